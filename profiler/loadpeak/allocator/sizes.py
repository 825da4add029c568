"""What a request becomes: its block and the segment that is asked of the device for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadpeak.allocator.settings import AllocatorSettings

MIB = 1 << 20
MIN_BLOCK = 512
"""Every block is a multiple of this (``kMinBlockSize``)."""
SMALL_LIMIT = MIB
"""The largest request that the small pool serves (``kSmallSize``)."""
SMALL_SEGMENT = 2 * MIB
"""A segment of the small pool, and the granule of its expandable segments (``kSmallBuffer``)."""
LARGE_SEGMENT = 20 * MIB
"""The same for the large pool, unless ``large_segment_size_mb`` says otherwise (``kLargeBuffer``)."""
OWN_SEGMENT = 10 * MIB
"""From here on a request gets a segment of its own (``kMinLargeAlloc``)."""
SEGMENT_STEP = 2 * MIB
"""Such a segment is a multiple of this (``kRoundLarge``)."""


def block_size(requested: int, settings: AllocatorSettings) -> int:
    """Bytes of the block that serves a request (``round_size``)."""
    if requested < MIN_BLOCK:
        return MIN_BLOCK
    divisions = settings.divisions(requested)
    if divisions > 1 and requested > MIN_BLOCK * divisions:
        return _next_division(requested, divisions)
    return (requested + MIN_BLOCK - 1) & -MIN_BLOCK


def _next_division(size: int, divisions: int) -> int:
    """The size rounded up to one of so many steps between two powers of two.

    ``roundup_power2_next_division``.
    """
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if size == floor:
        return size
    return floor << 1 if step == 0 else (size + step - 1) & -step


def segment_size(size: int, settings: AllocatorSettings) -> int:
    """Bytes that are asked of the device when no free block serves a block size.

    ``get_allocation_size``; the capacity is checked against it also with expandable segments, which then
    map what they lack, in granules.
    """
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return settings.large_segment_bytes
    return (size + SEGMENT_STEP - 1) & -SEGMENT_STEP
