"""What holds the memory at the peak: which layers' and which sizes' blocks, and what pins free memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loadpeak.allocator.history import History
from loadpeak.allocator.pools import Block
from loadpeak.allocator.replay import Boundary, Replay, Scenario


class Owner(NamedTuple):
    """What a block was requested for.

    Attributes:
        stage: ``before the layers``, ``layers`` or the like.
        layer: the layer that was under way, if one was.
        size: bytes that were requested.
    """

    stage: str
    layer: int | None
    size: int


_NOBODY = Owner("nobody yet", None, 0)
_SMALL_SHARE = 0.25
"""Blocks that together fill less of a segment than this pin the rest of it."""


class Hold(NamedTuple):
    """Memory of one stage and size: in use, and free since.

    Attributes:
        where: the stage, with the layers it is of.
        size: bytes that were requested for each block.
        live_bytes: in use.
        live_blocks: in so many blocks.
        free_bytes: last used by such blocks and free since.
    """

    where: str
    size: int
    live_bytes: int
    live_blocks: int
    free_bytes: int


class Pin(NamedTuple):
    """Segments, or granules of expandable ones, of which little is in use.

    Attributes:
        where: the stage whose blocks they are, with its layers.
        sizes: requested sizes of those blocks, the most frequent first.
        live_bytes: in use in all of them.
        free_bytes: free in all of them.
        segments: how many.
        segment_bytes: size of each.
    """

    where: str
    sizes: tuple[int, ...]
    live_bytes: int
    free_bytes: int
    segments: int
    segment_bytes: int


class Why(NamedTuple):
    """The peak of one scenario.

    Attributes:
        layer: the layer under way, or nothing outside the layers.
        reserved_bytes: at the peak.
        live_bytes: in use.
        returnable_bytes: free, and the device could have it back.
        pinned_bytes: free, but in a segment or granule with blocks in use.
        over_limit_bytes: free, in blocks that the split limit keeps from smaller requests.
        holds: by stage and size, the largest first.
        pins: what pins most, the most first.
    """

    layer: int | None
    reserved_bytes: int
    live_bytes: int
    returnable_bytes: int
    pinned_bytes: int
    over_limit_bytes: int
    holds: tuple[Hold, ...]
    pins: tuple[Pin, ...]


def explain(history: History, scenario: Scenario, boundaries: Sequence[Boundary], peak_bytes: int) -> Why:
    """Replay until the peak and look around.

    Args:
        history: the recorded history.
        scenario: what to replay it under.
        boundaries: ends of conversions.
        peak_bytes: what the whole replay had reserved at most.
    """
    replay = Replay(history, scenario, boundaries)
    replay.run(until_reserved=peak_bytes)
    requests, live = _requests(history, replay)
    owners = list(_owners(history, boundaries, requests))
    free = [block for pool in replay.model.all_pools() for block in pool.blocks.values()]
    in_use = {replay.blocks[number].address: owners[number] for number in live}
    holds: defaultdict[tuple[str, int], _Sum] = defaultdict(_Sum)
    for number in live:
        holds[owners[number].stage, owners[number].size].add(owners[number], live=replay.blocks[number].size)
    for number, size in _last_occupants(free, replay.addresses, requests, live):
        owner = _NOBODY if number < 0 else owners[number]
        holds[owner.stage, owner.size].add(owner, free=size)
    units = _units([*free, *(replay.blocks[number] for number in live)], in_use)
    pinned = sum(unit.free_bytes for unit in units if unit.live_bytes)
    total_free = sum(block.size for block in free)
    limit = replay.model.settings.max_split_bytes
    return Why(
        layer=replay.layer,
        reserved_bytes=replay.model.memory.reserved_bytes,
        live_bytes=replay.model.allocated_bytes,
        returnable_bytes=total_free - pinned,
        pinned_bytes=pinned,
        over_limit_bytes=sum(block.size for block in free if block.size >= limit),
        holds=tuple(
            Hold(found.where(stage), size, found.live_bytes, found.live_blocks, found.free_bytes)
            for (stage, size), found in sorted(holds.items(), key=lambda item: -item[1].total_bytes)
        ),
        pins=tuple(_pins(units)),
    )


def _requests(history: History, replay: Replay) -> tuple[list[tuple[int, int]], set[int]]:
    """Operation and requested size of each block so far, and the numbers of those in use."""
    requests = [(-1, block.size) for block in replay.blocks[: len(history.start.blocks)]]
    live = set(range(len(requests)))
    for place, operation in enumerate(history.operations):
        if operation < 0:
            live.discard(~operation)
        elif len(requests) == len(replay.blocks):
            break
        else:
            live.add(len(requests))
            requests.append((place, operation))
    return requests, {number for number in live if not replay.blocks[number].free}


class _Sum:
    """Blocks of one stage, added up."""

    def __init__(self) -> None:
        self.live_bytes = self.live_blocks = self.free_bytes = 0
        self._layers: set[int] = set()

    @property
    def total_bytes(self) -> int:
        return self.live_bytes + self.free_bytes

    def add(self, owner: Owner, live: int = 0, free: int = 0) -> None:
        self.live_bytes += live
        self.live_blocks += live > 0
        self.free_bytes += free
        if owner.layer is not None:
            self._layers.add(owner.layer)

    def where(self, stage: str) -> str:
        """The stage, with its layers."""
        if not self._layers:
            return stage
        first, last = min(self._layers), max(self._layers)
        return f"layer {first}" if first == last else f"layers {first} to {last}"


def _owners(
    history: History, boundaries: Sequence[Boundary], requests: Sequence[tuple[int, int]]
) -> Iterator[Owner]:
    """For each block what it was requested for."""
    at = history.operation_at
    numbered = [boundary for boundary in boundaries if boundary.layer is not None]
    ends = [at(boundary.event) for boundary in numbered]
    begin = at(boundaries[0].begin) if boundaries else 0
    for operation, size in requests:
        place = bisect_right(ends, operation)
        if operation < 0:
            yield Owner("before the recording", None, size)
        elif operation < begin:
            yield Owner("before the layers", None, size)
        elif place < len(numbered):
            yield Owner("layers", numbered[place].layer, size)
        else:
            yield Owner("after the layers" if numbered else "the program", None, size)


def _last_occupants(
    free: Iterable[Block],
    addresses: Sequence[int],
    requests: Sequence[tuple[int, int]],
    live: set[int],
) -> Iterator[tuple[int, int]]:
    """Who had each free byte last: block number and bytes, -1 for bytes that nobody had."""
    begins = sorted(block.address for block in free)
    sizes = {block.address: block.size for block in free}
    gaps = {address: [(address, address + sizes[address])] for address in begins}
    for number in range(len(addresses) - 1, -1, -1):
        if number in live:
            continue
        begin, end = addresses[number], addresses[number] + requests[number][1]
        place = max(bisect_right(begins, begin) - 1, 0)
        while place < len(begins) and begins[place] < end:
            left: list[tuple[int, int]] = []
            for low, high in gaps[begins[place]]:
                taken = min(high, end) - max(low, begin)
                if taken <= 0:
                    left.append((low, high))
                    continue
                yield number, taken
                left += [(a, b) for a, b in ((low, max(low, begin)), (min(high, end), high)) if a < b]
            gaps[begins[place]] = left
            place += 1
    for rest in gaps.values():
        for low, high in rest:
            yield -1, high - low


class _Unit:
    """A segment, or a granule of an expandable one: what goes back to the device as a whole."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_bytes = 0
        self.live_bytes: Counter[Owner] = Counter()


def _units(blocks: Iterable[Block], in_use: Mapping[int, Owner]) -> list[_Unit]:
    """What lies in each unit."""
    units: dict[int, _Unit] = {}
    begin = size = 0
    for block in sorted(blocks, key=lambda block: block.address):
        if block.segment is None and block.prev is None:
            begin, size = block.address, _chain_bytes(block)
        at, end = block.address, block.address + block.size
        while at < end:
            if block.segment is not None:
                size = block.segment.granule
                begin = at - (at - block.segment.base) % size
            unit = units.setdefault(begin, _Unit(size))
            taken = min(end, begin + size) - at
            if block.free:
                unit.free_bytes += taken
            else:
                unit.live_bytes[in_use[block.address]] += taken
            at += taken
    return list(units.values())


def _chain_bytes(block: Block | None) -> int:
    size = 0
    while block is not None:
        size += block.size
        block = block.next
    return size


def _pins(units: Iterable[_Unit]) -> list[Pin]:
    """Units of which little is in use, those of the same stage together, what pins most first."""
    alike: defaultdict[tuple[str, int], list[_Unit]] = defaultdict(list)
    for unit in units:
        if 0 < unit.live_bytes.total() < _SMALL_SHARE * unit.size:
            largest = max(unit.live_bytes, key=lambda owner: unit.live_bytes[owner])
            alike[largest.stage, unit.size].append(unit)
    pins: list[Pin] = []
    for (stage, size), group in alike.items():
        found = _Sum()
        sizes: Counter[int] = Counter()
        for unit in group:
            found.free_bytes += unit.free_bytes
            for owner, live in unit.live_bytes.items():
                found.add(owner, live)
                sizes[owner.size] += 1
        common = tuple(requested for requested, _ in sizes.most_common(3))
        where = found.where(stage)
        pins.append(Pin(where, common, found.live_bytes, found.free_bytes, len(group), size))
    return sorted(pins, key=lambda pin: -pin.free_bytes)
