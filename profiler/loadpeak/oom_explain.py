"""What the figures of an out-of-memory message mean together, and what to record next."""

from __future__ import annotations

from collections.abc import Iterator

from loadpeak.oom_message import Found, OomMessage

_GIB, _MIB = 1 << 30, 1 << 20
_NAMES = (
    ("asked for", "requested_bytes"),
    ("device capacity", "capacity_bytes"),
    ("free on the device", "free_bytes"),
    ("in use by this process", "process_in_use_bytes"),
    ("allocated by PyTorch", "allocated_bytes"),
    ("reserved but unallocated", "reserved_unallocated_bytes"),
    ("reserved by PyTorch", "reserved_bytes"),
    ("free in private pools", "private_pool_bytes"),
)
_RECORD_HISTORY = """\
Record the allocator's history of the next start, and ask it what would have helped:
    LOADPEAK_MEMORY_HISTORY=1000000 loadpeak run -- vllm serve …
    loadpeak whatif RUN_FOLDER/history-0.pickle.gz"""
_RECORD_DEVICE = """\
Record the device beside the allocator, phase by phase:
    loadpeak run -- vllm serve …"""


def explain(found: Found) -> str:
    """The figures in bytes, then sentences; plain text."""
    message = found.message
    lines = [] if found.device is None else [f"{'device':<26}{found.device:>18}"]
    for name, field in _NAMES:
        lines.append(_line(name, getattr(message, field)))
    lines += [_line(f"in use by process {pid}", size) for pid, size in found.others]
    if found.allowed_bytes is not None:
        lines.append(_line("allowed to this process", found.allowed_bytes))
    sentences = list(_sentences(found))
    return "\n".join([*lines, "", *sentences, "", _next_recording(message)])


def _line(name: str, size: int | None) -> str:
    if size is None:
        return f"{name:<26}{'not said':>18}"
    return f"{name:<26}{size:>18,}  {_human(size)}"


def _human(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.2f} MiB"


def _sentences(found: Found) -> Iterator[str]:
    message = found.message
    requested, capacity, free = message.requested_bytes, message.capacity_bytes, message.free_bytes
    allocated, unallocated = message.allocated_bytes, message.reserved_unallocated_bytes
    if not found.fatal:
        yield "This is a warning, not the error: PyTorch gives its cache back and tries again."
    if requested == 20 * _MIB:
        yield "20 MiB is the segment that a tensor of 1 to 10 MiB asks for, not the tensor's size."
    together = None if requested is None or allocated is None else requested + allocated
    if together is not None and capacity is not None and together > capacity:
        yield (
            f"What is allocated and what was asked for come to {_human(together)}, more than the device has: "
            "no allocator setting helps, less has to be in use at once."
        )
    if unallocated is not None and requested is not None:
        if unallocated >= requested:
            yield (
                f"{_human(unallocated)} are reserved but not in use, enough for the request, and could not "
                "be given back: blocks in use pin them. Other settings or a release per layer may help."
            )
        else:
            yield (
                f"Only {_human(unallocated)} are reserved but not in use, less than was asked for: "
                "fragmentation is not the cause by itself."
            )
    if message.process_in_use_bytes is not None and message.reserved_bytes is not None:
        outside = message.process_in_use_bytes - message.reserved_bytes
        if outside > 0:
            yield f"{_human(outside)} of this process are outside PyTorch: CUDA context, NCCL, libraries."
    if found.others:
        total = sum(size for _, size in found.others)
        yield (
            f"Other process ids hold {_human(total)}. In a container the process itself may appear as one "
            "of them."
        )
    if message.private_pool_bytes:
        yield f"{_human(message.private_pool_bytes)} lie free in private pools, for CUDA graphs alone."
    if free is not None and requested is not None and free >= requested:
        yield (
            "More is free on the device than was asked for: a limit on the process was reached, or it was "
            "freed in between."
        )


def _next_recording(message: OomMessage) -> str:
    if message.reserved_bytes is None and message.allocated_bytes is None:
        return _RECORD_DEVICE
    if message.reserved_unallocated_bytes is None or message.requested_bytes is None:
        return _RECORD_HISTORY
    cached = message.reserved_unallocated_bytes >= message.requested_bytes
    return _RECORD_HISTORY if cached else f"{_RECORD_DEVICE}\n{_RECORD_HISTORY}"
