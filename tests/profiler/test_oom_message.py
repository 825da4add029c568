"""Out-of-memory messages in their historic and current forms, bare and as logs print them."""

from __future__ import annotations

import msgspec
import pytest

from loadpeak.errors import MessageError
from loadpeak.oom_explain import explain
from loadpeak.oom_message import OomMessage, read

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def gib(value: float) -> int:
    return round(value * GIB)


def mib(value: float) -> int:
    return round(value * MIB)


CURRENT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 31.74 GiB of which "
    "401.38 MiB is free. {processes}Of the allocated memory 30.20 GiB is allocated by PyTorch, {pools}and "
    "655.12 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
BASE = OomMessage(
    requested_bytes=2 * GIB,
    capacity_bytes=gib(31.74),
    free_bytes=mib(401.38),
    allocated_bytes=gib(30.20),
    reserved_unallocated_bytes=mib(655.12),
    reserved_bytes=gib(30.20) + mib(655.12),
)
OLD = (
    "CUDA out of memory. Tried to allocate 70.00 MiB (GPU 0; 15.75 GiB total capacity; 14.30 GiB already "
    "allocated; 30.88 MiB free; {last})"
)
OLD_BASE = OomMessage(
    requested_bytes=70 * MIB, capacity_bytes=gib(15.75), free_bytes=mib(30.88), allocated_bytes=gib(14.30)
)


def with_(base: OomMessage, **fields: int | None) -> OomMessage:
    return msgspec.structs.replace(base, **fields)


FORMS: dict[str, tuple[str, OomMessage]] = {
    "1.0": (
        "RuntimeError: " + OLD.format(last="122.75 MiB cached"),
        with_(
            OLD_BASE,
            reserved_unallocated_bytes=mib(122.75),
            reserved_bytes=gib(14.30) + mib(122.75),
        ),
    ),
    "1.4, cached may be all or the rest": (OLD.format(last="14.61 GiB cached"), OLD_BASE),
    "1.5": (
        OLD.format(last="14.61 GiB reserved in total by PyTorch"),
        with_(OLD_BASE, reserved_bytes=gib(14.61)),
    ),
    "2.1": (
        CURRENT.replace("capacity", "capacty").format(
            processes="Process 4711 has 31.34 GiB memory in use. ", pools=""
        ),
        BASE,
    ),
    "2.2": (
        CURRENT.format(
            processes="Including non-PyTorch memory, this process has 31.34 GiB memory in use. ", pools=""
        ),
        with_(BASE, process_in_use_bytes=gib(31.34)),
    ),
    "private pools": (
        CURRENT.format(processes="", pools="with 1.50 GiB allocated in private pools (e.g., CUDA Graphs), "),
        with_(BASE, private_pool_bytes=gib(1.5)),
    ),
    "memory fraction": (CURRENT.format(processes="16.00 GiB allowed; ", pools=""), BASE),
    "HIP": (CURRENT.format(processes="", pools="").replace("CUDA out", "HIP out"), BASE),
    "XPU, nothing about what is free": (
        "XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.91 GiB.",
        OomMessage(requested_bytes=2 * GIB, capacity_bytes=gib(15.91)),
    ),
    "cudaMallocAsync": (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 22.43 GiB\nRequested               : 4.07 GiB\n"
        "Device limit            : 23.56 GiB\nFree (according to CUDA): 0 bytes\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        OomMessage(
            requested_bytes=gib(4.07), capacity_bytes=gib(23.56), free_bytes=0, allocated_bytes=gib(22.43)
        ),
    ),
    "MPS": (
        "MPS backend out of memory (MPS allocated: 17.72 GB, other allocations: 384.00 KB, max allowed: "
        "18.13 GB). Tried to allocate 512.00 MB on private pool.",
        OomMessage(requested_bytes=512 * MIB, allocated_bytes=gib(17.72)),
    ),
    "warning": (
        "memory allocation failed with OOM on device 3 while trying to allocate 62914560 bytes "
        "(free: 21692416, total: 34072559616).",
        OomMessage(requested_bytes=62914560, free_bytes=21692416, capacity_bytes=34072559616),
    ),
    "no numbers": ("torch.AcceleratorError: CUDA error: out of memory", OomMessage()),
    "cut off": (
        "CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 31.7",
        OomMessage(requested_bytes=GIB),
    ),
    "small units": (
        "CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 64.50 KiB of which "
        "1 bytes is free.",
        OomMessage(requested_bytes=512, capacity_bytes=round(64.5 * KIB), free_bytes=1),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_figures_of_every_form(form: str) -> None:
    text, expected = FORMS[form]
    assert read(text).message == expected


@pytest.mark.parametrize("form", FORMS.keys() - {"warning"})
def test_class_before_the_message_changes_nothing(form: str) -> None:
    text, expected = FORMS[form]
    for name in ("RuntimeError", "torch.cuda.OutOfMemoryError", "torch.OutOfMemoryError"):
        assert read(f"{name}: {text}").message == expected


def test_sentinels_are_no_readings() -> None:
    """NVML without a reading prints 2⁶⁴ bytes; a difference below zero prints little less."""
    text = CURRENT.format(
        processes="Process 5 has 17179869184.00 GiB memory in use. "
        "this process has 17179869184.00 GiB memory in use. ",
        pools="",
    ).replace("655.12 MiB is reserved", "17179869183.99 GiB is reserved")
    found = read(text)
    assert found.others == ()
    assert found.message == with_(BASE, reserved_unallocated_bytes=None, reserved_bytes=None)


def test_negative_figure_is_none() -> None:
    text = CURRENT.format(processes="", pools="").replace("655.12 MiB is reserved", "-655.12 MiB is reserved")
    assert read(text).message.reserved_unallocated_bytes is None


def test_processes_in_any_order() -> None:
    clauses = (
        "Process 12 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 30.00 GiB "
        "memory in use. Process 77 has 512.00 MiB memory in use. "
    )
    found = read(CURRENT.format(processes=clauses, pools=""))
    assert found.message.process_in_use_bytes == 30 * GIB
    assert found.others == ((12, GIB), (77, 512 * MIB))
    assert found.device == 3


def dressed(text: str, width: int = 60) -> str:
    """The message as a worker's log prints it, in colour, wrapped, and quoted in an issue."""
    prefix = "(Worker_TP3 pid=1387) ERROR 09-17 22:16:22 [multiproc_executor.py:640]"
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(f"> \x1b[31m{prefix} [rank0]: {line}\x1b[0m" for line in lines)


@pytest.mark.parametrize("form", FORMS)
def test_dressing_and_soft_wraps_are_taken_off(form: str) -> None:
    text, expected = FORMS[form]
    assert read(f"INFO starting\n{dressed(text)}\nINFO done").message == expected


def test_message_that_several_processes_print_is_one() -> None:
    text, expected = FORMS["2.2"]
    shorter = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert read("\n".join([shorter, text, text, shorter])).message == expected


def test_error_counts_more_than_the_warnings_before_it() -> None:
    warning, error = FORMS["warning"][0], FORMS["XPU, nothing about what is free"]
    found = read("\n".join([warning, warning, error[0]]))
    assert found.fatal
    assert found.message == error[1]


def test_warning_counts_where_the_error_has_no_figures() -> None:
    warning, expected = FORMS["warning"]
    assert read(f"{warning}\ntorch.OutOfMemoryError: CUDA out of memory.").message == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: No available memory for the cache blocks.",
        "Out of memory: Killed process 1234 (python) total-vm:1kB",
        "java.lang.OutOfMemoryError: Java heap space",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes",
        "I tried to allocate 5 GiB of my time",
        "I tried to allocate time for this and ran out of memory",
        "expandable_segments helps when memory is 655.12 MiB free",
    ],
)
def test_other_texts_are_said_to_be_none(text: str) -> None:
    with pytest.raises(MessageError, match="no out-of-memory message"):
        read(text)


def test_explanation_gives_bytes_and_what_they_mean() -> None:
    text = explain(read(FORMS["2.2"][0]))
    assert f"{gib(31.34):,}" in text
    assert "outside PyTorch" in text
    assert "more than the device has" in text
    assert "not said" in text, "the message says nothing about private pools"


def test_pinned_memory_calls_for_a_history() -> None:
    text = CURRENT.replace("655.12 MiB", "12.00 GiB").replace("30.20", "18.00").format(processes="", pools="")
    assert "blocks in use pin them" in explain(read(text))
    assert "LOADPEAK_MEMORY_HISTORY" in explain(read(text))


@pytest.mark.parametrize("prefix", ["", "(EngineCore_0 pid=42) ", "[rank0]: "])
@pytest.mark.parametrize("form", FORMS)
def test_figures_are_whole_wherever_a_terminal_wraps(form: str, prefix: str) -> None:
    text, expected = FORMS[form]
    line = "torch.OutOfMemoryError: " + text.replace("\n", " ")
    for width in range(40, 201):
        wrapped = "\n".join(prefix + line[start : start + width] for start in range(0, len(line), width))
        assert read(wrapped).message == expected, f"at {width} columns"


def test_line_that_begins_like_a_log_is_read() -> None:
    """A terminal has wrapped before a word that logs begin with."""
    assert read("torch.AcceleratorError: CUDA\n error: out of memory").message == OomMessage()


def test_number_before_a_figure_is_no_part_of_it() -> None:
    text = CURRENT.format(processes="", pools="").replace("30.20", "7 30.20")
    assert read(text).message == BASE


def test_message_that_was_cut_in_a_figure_goes_on_with_nothing() -> None:
    text, expected = FORMS["cut off"]
    assert read(f"{text}\nBacktrace:").message == expected
