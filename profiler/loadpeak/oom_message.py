"""Read the text of PyTorch's out-of-memory errors, in the forms they have had since torch 1.0.

Each figure is looked for by the words around it, anywhere in the message: forms differ in which figures they
give and in what order, and what follows them (advice, links) changes with every release. A figure that the
message does not give is missing, never derived from others, with one exception: allocated and unallocated
memory add up to what is reserved, by the way PyTorch computes them (``DeviceCachingAllocator::malloc``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple

import msgspec

from loadpeak.errors import MessageError


class OomMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one message, bytes, as printed: two decimals of the unit; missing where it has none.

    Attributes:
        requested_bytes: the segment that was asked for, which may be larger than the tensor.
        capacity_bytes: the device's memory, as CUDA reports it.
        free_bytes: free on the device.
        process_in_use_bytes: all device memory of the process, where the message says which one it is.
        allocated_bytes: in use by tensors, free blocks of private pools included.
        reserved_unallocated_bytes: cached by the allocator and pinned by blocks in use.
        reserved_bytes: all that the allocator holds.
        private_pool_bytes: free blocks of private pools (CUDA graphs).
    """

    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    process_in_use_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    reserved_bytes: int | None = None
    private_pool_bytes: int | None = None


class Found(NamedTuple):
    """A message in a text, with what is not a figure of the process itself.

    Attributes:
        message: its figures.
        device: the index it names, if it names one.
        others: process id and memory in use of the other processes it names.
        allowed_bytes: what the process is allowed to use, if a limit was set.
        fatal: false for the warning that precedes another try.
    """

    message: OomMessage
    device: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    allowed_bytes: int | None = None
    fatal: bool = True


_APART = 300
"""Characters within which one beginning goes on with the message of another."""
_LONGEST = 3000
"""Characters of the longest message: 900 and a clause for each process on the device."""
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = r"(?<![-\d.,])(\d+(?:\.\d+)?)(bytes|[KMGT]i?B)"
_SENTINEL = 1 << 63
"""A reading that was not available, or a difference below zero, prints as 2⁶⁴ or little less."""


def _pattern(text: str) -> re.Pattern[str]:
    """Written with blanks for people; matched in a text without, as a terminal may wrap it anywhere."""
    return re.compile(text.replace(" ", ""), re.IGNORECASE)


_FIGURES: tuple[tuple[str, str], ...] = (
    ("requested_bytes", rf"tried to allocate {_SIZE}"),
    ("requested_bytes", rf"requested: {_SIZE}"),
    ("capacity_bytes", rf"total capa?ci?ty of {_SIZE}"),
    ("capacity_bytes", rf"{_SIZE} total capacity"),
    ("capacity_bytes", rf"device limit: {_SIZE}"),
    ("free_bytes", rf"of which {_SIZE} is free"),
    ("free_bytes", rf"; {_SIZE} free;"),
    ("free_bytes", rf"free \(according to CUDA\): {_SIZE}"),
    ("process_in_use_bytes", rf"this process has {_SIZE} memory in use"),
    ("allocated_bytes", rf"{_SIZE} is allocated by PyTorch"),
    ("allocated_bytes", rf"{_SIZE} already allocated"),
    ("allocated_bytes", rf"currently allocated: {_SIZE}"),
    ("allocated_bytes", rf"MPS allocated: {_SIZE}"),
    ("reserved_unallocated_bytes", rf"{_SIZE} is reserved by PyTorch but unallocated"),
    ("reserved_bytes", rf"{_SIZE} reserved in total by PyTorch"),
    ("private_pool_bytes", rf"with {_SIZE} allocated in private pools"),
)
_CACHED = _pattern(rf"{_SIZE} cached\)")
_ALLOWED = _pattern(rf"{_SIZE} allowed")
_OTHER = _pattern(rf"\bprocess (\d+) has {_SIZE} memory in use")
_DEVICE = _pattern(r"(?:GPU|[NX]PU|device) (\d+)")
_PATTERNS = tuple((field, _pattern(pattern)) for field, pattern in _FIGURES)

_WARNING = _pattern(
    r"memory allocation failed with OOM on device (\d+) while trying to allocate (\d+) bytes "
    r"\(free: (\d+), total: (\d+)\)"
)
_BEGINNING = _pattern(
    r"(?:CUDA|(?-i:HIP|XPU|NPU|MPS|MUSA|MLU|HPU))\w{0,18}?:? out of memory"
    r"|tried to allocate (?:\d+ bytes|\d+\.\d\d [KMGT]i?B)"
    r"|allocation on device \d+ would exceed allowed memory"
    r"|torch(?:\.cuda)?\.OutOfMemoryError"
    r"|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DRESSING = re.compile(
    r"^(?:\s+|[>|│]"
    r"|\([^()\n]*pid=\d+[^()\n]*\)"
    r"|\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b\]?:?"
    r"|\[?(?:\d{4}[-/])?\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?:?"
    r"|\[[\w./-]+:\d+\]"
    r"|\[?rank ?\d+\]?:)+",
    re.IGNORECASE | re.MULTILINE,
)
"""What logs, quotes and launchers put before a line of a message."""
_BETWEEN_NUMBERS = re.compile(r"(?<=\d)[ \t]+(?=\d)")
"""Blanks that keep two numbers apart; a line's end may lie within one number."""


def read(text: str) -> Found:
    """The message in a text: the first of those that say most, where there are several.

    Raises:
        MessageError: the text holds none.
    """
    found = list(_messages(text))
    if not found:
        raise MessageError(
            "this is no out-of-memory message of PyTorch; give the text of the error, "
            "for example `loadpeak whatif --oom vllm.log`"
        )
    return max(found, key=lambda one: (one.fatal and _figures(one) > 0, _figures(one)))


def _figures(found: Found) -> int:
    """How much a message says."""
    return sum(value is not None for value in msgspec.structs.astuple(found.message))


def _messages(text: str) -> Iterator[Found]:
    """Every message, without what is wrapped around and between its lines, and without blanks."""
    undressed = _DRESSING.sub("", _COLOUR.sub("", text))
    plain = "".join(_BETWEEN_NUMBERS.sub("|", undressed).split())
    for warning in _WARNING.finditer(plain):
        device, requested, free, total = map(int, warning.groups())
        figures = OomMessage(requested_bytes=requested, free_bytes=free, capacity_bytes=total)
        yield Found(figures, device, fatal=False)
    plain = _WARNING.sub("", plain)
    heads: list[int] = []
    before = 0
    for match in _BEGINNING.finditer(plain):
        # "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" are three beginnings of one message.
        between = plain[before : match.start()].lower()
        if not heads or len(between) > _APART or "triedtoallocate" in between:
            heads.append(match.start())
        before = match.start()
    for begin, end in pairwise([*heads, len(plain)]):
        yield _parse(plain[begin : min(end, begin + _LONGEST)])


def _parse(text: str) -> Found:
    values: dict[str, int | None] = {}
    for field, pattern in _PATTERNS:
        match = pattern.search(text)
        if match is not None:
            values.setdefault(field, _bytes(*match.groups()))
    allocated = values.get("allocated_bytes")
    cached = _CACHED.search(text)
    if cached is not None and allocated is not None:
        # torch 1.0 to 1.4 printed what is cached beyond the allocated, or all of it: what is more than is
        # allocated may be either.
        size = _bytes(*cached.groups())
        if size is not None and size < allocated:
            values["reserved_unallocated_bytes"] = size
    unallocated = values.get("reserved_unallocated_bytes")
    if allocated is not None and unallocated is not None:
        values.setdefault("reserved_bytes", allocated + unallocated)
    device_match = _DEVICE.search(text)
    allowed = _ALLOWED.search(text)
    others = [(int(pid), _bytes(number, unit)) for pid, number, unit in _OTHER.findall(text)]
    return Found(
        OomMessage(**values),
        device=int(device_match[1]) if device_match else None,
        others=tuple((pid, size) for pid, size in others if size is not None),
        allowed_bytes=_bytes(*allowed.groups()) if allowed else None,
    )


def _bytes(number: str, unit: str) -> int | None:
    """A printed size in bytes; missing where the print stands for no reading."""
    size = round(Decimal(number) * _UNITS[unit[0].lower()])
    return size if size < _SENTINEL else None


def to_json(found: Found) -> str:
    """What ``--oom … --json`` prints; bytes, null where the message does not say."""
    return msgspec.json.format(msgspec.json.encode(found.message), indent=2).decode()
