"""What a process had of the device before its recorded history begins.

A history that was switched on late, or whose oldest entries made room for newer ones, begins in the middle.
What was there then follows from what is there when the snapshot is taken, by going back through the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from loadpeak.allocator.model import DEFAULT_POOL, AllocatorModel, Lane
from loadpeak.allocator.pools import Block, Pool
from loadpeak.allocator.settings import AllocatorSettings
from loadpeak.allocator.sizes import SMALL_SEGMENT, block_size

if TYPE_CHECKING:
    from loadpeak.allocator.history import SegmentEvent

_UNIT = SMALL_SEGMENT
"""Expandable segments are mapped in multiples of this."""
_DEFAULTS = AllocatorSettings()


class FoundFree(NamedTuple):
    """A free of a block whose allocation the history does not hold; ``operation`` is its place there."""

    operation: int
    address: int
    size: int
    lane: Lane


class StartSegment(NamedTuple):
    """Memory that was there: a segment, or a stretch of an expandable one, with the blocks in use in it."""

    address: int
    size: int
    lane: Lane
    small: bool
    expandable: bool
    blocks: tuple[tuple[int, int], ...]
    """Address and size, ascending."""


class Start(NamedTuple):
    """What was there.

    Attributes:
        segments: ascending by address.
        blocks: addresses of the blocks in use; a block's number is its place here.
        frees: places of the operations that free one of them, with its number.
    """

    segments: tuple[StartSegment, ...]
    blocks: tuple[int, ...]
    frees: tuple[tuple[int, int], ...]

    @property
    def reserved_bytes(self) -> int:
        """All of it, free or in use."""
        return sum(segment.size for segment in self.segments)


def reconstruct(
    segment_events: Sequence[SegmentEvent],
    segments: Sequence[Mapping[str, Any]],
    found_free: Sequence[FoundFree],
    live: Mapping[int, int],
) -> Start:
    """What was there before the first event.

    Args:
        segment_events: what the allocator asked of the device, in order.
        segments: what was there when the snapshot was taken.
        found_free: frees of blocks that were there at the start.
        live: addresses of the blocks that were allocated in the history and are still in use at its end.

    Raises:
        KeyError: a segment lacks a field.
        ValueError: blocks lie over each other, or more memory is mapped than any device has.
    """
    whole, units = _go_back(segment_events, segments)
    blocks = {free.address: (block_size(free.size, _DEFAULTS), free.lane) for free in found_free}
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in live:
                blocks[block["address"]] = (block["size"], _lane(segment))
    found = [*whole, *_stretches(units)]
    placed = _place_blocks(found, blocks)
    addresses = tuple(address for segment in placed for address, _ in segment.blocks)
    number = {address: place for place, address in enumerate(addresses)}
    return Start(
        segments=placed,
        blocks=addresses,
        frees=tuple((free.operation, number[free.address]) for free in found_free),
    )


def _lane(segment: Mapping[str, Any]) -> Lane:
    return segment["stream"], tuple(segment.get("segment_pool_id", DEFAULT_POOL))


_Unit = tuple[Lane, bool]
"""Lane of a mapped unit, and whether it is the small pool's."""
_MOST_UNITS = 20_000_000
"""Forty terabytes mapped or unmapped in one history: more is no history."""


def _go_back(
    segment_events: Sequence[SegmentEvent], segments: Sequence[Mapping[str, Any]]
) -> tuple[list[StartSegment], dict[int, _Unit]]:
    """Ordinary segments and mapped units before the first event."""
    sizes = [segment["total_size"] for segment in segments] + [event.size for event in segment_events]
    if min(sizes, default=0) < 0 or sum(sizes) > _MOST_UNITS * _UNIT:
        raise ValueError("more memory is mapped than any device has")
    whole: dict[int, tuple[int, Lane, bool]] = {}
    units: dict[int, _Unit] = {}
    for segment in segments:
        address, size, small = segment["address"], segment["total_size"], segment["segment_type"] == "small"
        if segment.get("is_expandable"):
            units.update(dict.fromkeys(range(address, address + size, _UNIT), (_lane(segment), small)))
        else:
            whole[address] = (size, _lane(segment), small)
    for event in reversed(segment_events):
        lane = (event.stream, DEFAULT_POOL)
        span = range(event.address, event.address + event.size, _UNIT)
        if event.action == "segment_alloc":
            whole.pop(event.address, None)
        elif event.action == "segment_free":
            whole[event.address] = (event.size, lane, event.size == SMALL_SEGMENT)
        elif event.action == "segment_map":
            for unit in span:
                units.pop(unit, None)
        elif event.action == "segment_unmap":
            small = event.size % _DEFAULTS.large_segment_bytes != 0
            units.update(dict.fromkeys(span, (lane, small)))
    return [StartSegment(address, *what, False, ()) for address, what in whole.items()], units


def _stretches(units: Mapping[int, _Unit]) -> list[StartSegment]:
    """Mapped units that follow each other, as one stretch each."""
    ascending = sorted(units)
    cuts = [0]
    for place, (before, after) in enumerate(pairwise(ascending), start=1):
        if after - before != _UNIT or units[before] != units[after]:
            cuts.append(place)
    cuts.append(len(ascending))
    return [
        StartSegment(ascending[first], (end - first) * _UNIT, *units[ascending[first]], True, ())
        for first, end in pairwise(cuts)
        if first < end
    ]


def _place_blocks(
    segments: Iterable[StartSegment], blocks: Mapping[int, tuple[int, Lane]]
) -> tuple[StartSegment, ...]:
    """The segments with their blocks; a block outside all of them gets one of its own."""
    waiting = sorted(blocks, reverse=True)
    placed: list[StartSegment] = []

    def place(until: int) -> None:
        while waiting and waiting[-1] < until:
            address = waiting.pop()
            size, lane = blocks[address]
            placed.append(StartSegment(address, size, lane, False, False, ((address, size),)))

    for segment in sorted(segments):
        place(until=segment.address)
        end = at = segment.address
        end += segment.size
        inside: list[tuple[int, int]] = []
        while waiting and waiting[-1] < end:
            address = waiting.pop()
            size = blocks[address][0]
            if address < at or address + size > end:
                raise ValueError(f"blocks lie over each other at address {address}")
            inside.append((address, size))
            at = address + size
        placed.append(segment._replace(blocks=tuple(inside)))
    place(until=1 << 64)
    return tuple(placed)


def put(model: AllocatorModel, start: Start) -> list[Block]:
    """Give a fresh model what was there; returns the blocks in use, by their numbers.

    Stretches of expandable segments can grow as they could if the model has expandable segments, and are
    ordinary segments if not.
    """
    used: list[Block] = []
    spaces: dict[tuple[Lane, bool], Block] = {}
    for segment in start.segments:
        pool = model.pools(segment.lane)[0 if segment.small else 1]
        model.memory.adopt(segment.size)
        if segment.expandable and model.settings.expandable_segments:
            kind = (segment.lane, segment.small)
            if kind not in spaces:
                granule = SMALL_SEGMENT if segment.small else model.settings.large_segment_bytes
                spaces[kind] = model.memory.addresses_from(segment.address, pool, granule)
            space = spaces[kind]
            if segment.address > space.address:
                pool.insert_unmapped(space.split_off(segment.address - space.address))
            block = space.split_off(segment.size)
            block.mapped = True
        else:
            block = Block(segment.address, segment.size, pool, None)
        used += _fill(block, segment.blocks, pool)
    for space in spaces.values():
        space.pool.insert_unmapped(space)
    model.allocated_bytes = model.allocated_peak_bytes = sum(block.size for block in used)
    return used


def _fill(block: Block, blocks: Sequence[tuple[int, int]], pool: Pool) -> list[Block]:
    """Cut the blocks in use out of a block; the pieces between them are free."""
    used: list[Block] = []
    for address, size in blocks:
        if address > block.address:
            pool.insert(block.split_off(address - block.address))
        whole = block.size == size
        piece = block if whole else block.split_off(size)
        piece.free = False
        used.append(piece)
        if whole:
            return used
    pool.insert(block)
    return used
