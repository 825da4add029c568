"""The caching allocator of one device (``DeviceCachingAllocator``): what serves a request, and what it costs.

Two methods, :meth:`AllocatorModel.alloc` and :meth:`AllocatorModel.free`, run once per recorded event, six
hundred thousand times in a history of that length. They do the pools' work in place instead of calling it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from loadpeak.allocator.pools import ADDRESS_BITS, Pool
from loadpeak.allocator.segments import DeviceMemory
from loadpeak.allocator.settings import UNLIMITED
from loadpeak.allocator.sizes import (
    MIN_BLOCK,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    block_size,
    segment_size,
)

if TYPE_CHECKING:
    from loadpeak.allocator.pools import Block
    from loadpeak.allocator.segments import SegmentEvent
    from loadpeak.allocator.settings import AllocatorSettings

Lane = tuple[int, tuple[int, int]]
"""What a request comes from: a stream, and a private pool's id or ``DEFAULT_POOL``."""
DEFAULT_POOL = (0, 0)


class OutOfMemoryError(Exception):
    """No memory for a request, even after everything that can be given back was.

    Attributes:
        size: bytes of the segment that was asked for, which is what PyTorch's message names.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"no room for {size} bytes")
        self.size = size


class AllocatorModel:
    """One device's caching allocator.

    Args:
        settings: in force at first.
        capacity_bytes: the most that may be reserved (``set_per_process_memory_fraction``, or the device).
        on_event: told every request to the device.
        finish_frees: frees the blocks that wait for another stream; called where PyTorch synchronizes.

    Attributes:
        memory: what is had of the device.
        allocated_bytes: in use, as blocks.
        allocated_peak_bytes: the most since the peak was last reset.
        retries: searches for memory that began by giving everything back (``num_alloc_retries``).
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int | None = None,
        on_event: SegmentEvent | None = None,
        finish_frees: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = DeviceMemory(capacity_bytes, on_event)
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.retries = 0
        self._finish_frees = finish_frees
        self._lanes: dict[Lane, tuple[Pool, Pool]] = {}
        self._searches = 0
        self.use_lane((0, DEFAULT_POOL))
        self.apply(settings)

    def apply(self, settings: AllocatorSettings) -> None:
        """Put other settings in force; what is there already stays as it is."""
        self.settings = settings
        self._expandable = settings.expandable_segments
        self._split_limit = settings.max_split_bytes
        self._rounds = bool(settings.roundup_divisions)
        self._collects = settings.garbage_collection_threshold > 0 and self.memory.capacity_bytes is not None

    def use_lane(self, lane: Lane) -> None:
        """Serve the next requests from the pools of this stream and private pool (``get_pool``)."""
        self._small, self._large = self.pools(lane)
        self._in_default_pool = lane[1] == DEFAULT_POOL

    def pools(self, lane: Lane) -> tuple[Pool, Pool]:
        """The small and the large pool of a lane."""
        if lane not in self._lanes:
            self._lanes[lane] = (Pool(small=True), Pool(small=False))
        return self._lanes[lane]

    def all_pools(self) -> list[Pool]:
        """The pools of every lane."""
        return [pool for pools in self._lanes.values() for pool in pools]

    def alloc(self, requested: int) -> Block:
        """A block for a request (``malloc``, ``should_split``, ``alloc_found_block``).

        Raises:
            OutOfMemoryError: there is none within the capacity.
        """
        if self._rounds:
            size = block_size(requested, self.settings)
        else:
            size = (requested + MIN_BLOCK - 1) & -MIN_BLOCK or MIN_BLOCK
        small = size <= SMALL_LIMIT
        pool = self._small if small else self._large
        block = self._search(pool, size) or self._grow(pool, size)
        rest = block.size - size
        if (
            rest >= MIN_BLOCK
            if small or self._expandable
            else rest > SMALL_LIMIT and size < self._split_limit
        ):
            remaining, block = block, block.split_off(size)
            remaining.idle_since = self._searches
            key = rest << ADDRESS_BITS | remaining.address
            insort(pool.keys, key)
            pool.blocks[key] = remaining
        block.free = False
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        if allocated > self.allocated_peak_bytes:
            self.allocated_peak_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, joined with its free neighbours (``free_block``)."""
        self.allocated_bytes -= block.size
        pool = block.pool
        keys, blocks = pool.keys, pool.blocks
        near = block.prev
        if near is not None and near.free and near.mapped:
            key = near.size << ADDRESS_BITS | near.address
            del keys[bisect_left(keys, key)], blocks[key]
            block.address = near.address
            block.size += near.size
            block.prev = near = near.prev
            if near is not None:
                near.next = block
        near = block.next
        if near is not None and near.free and near.mapped:
            key = near.size << ADDRESS_BITS | near.address
            del keys[bisect_left(keys, key)], blocks[key]
            block.size += near.size
            block.next = near = near.next
            if near is not None:
                near.prev = block
        block.free = True
        block.idle_since = self._searches
        key = block.size << ADDRESS_BITS | block.address
        insort(keys, key)
        blocks[key] = block

    def empty_cache(self) -> None:
        """Give back what is free (``release_cached_blocks``); private pools in use give nothing back."""
        self._finish_frees()
        lanes = sorted(lane for lane in self._lanes if lane[1] == DEFAULT_POOL)
        for lane in lanes:
            self.memory.release_all(self._lanes[lane][1])
        for lane in lanes:
            self.memory.release_all(self._lanes[lane][0])

    # ── where a block comes from ──────────────────────────────────────────────────────────────────

    def _search(self, pool: Pool, size: int) -> Block | None:
        """The free block that fits best, out of its pool, or nothing (``get_free_block``)."""
        if self._collects and pool is self._large and self._in_default_pool:
            self._searches += 1
        keys, blocks = pool.keys, pool.blocks
        place, count = bisect_left(keys, size << ADDRESS_BITS), len(keys)
        if place == count:
            return None
        block = blocks[keys[place]]
        if block.segment is not None:
            if self._expandable:
                place = _least_expandable(pool, place)
            else:
                # Switched off since: only blocks of ordinary segments, and only above one that is not.
                place += 1
                while place < count and blocks[keys[place]].segment is not None:
                    place += 1
                if place == count:
                    return None
            block = blocks[keys[place]]
        limit = self._split_limit
        if size < limit:
            if block.size >= limit:
                return None
        elif block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        del blocks[keys[place]], keys[place]
        return block

    def _grow(self, pool: Pool, size: int) -> Block:
        """Memory from the device; where there is none, what can be given back is, and again (``malloc``)."""
        if self._collects:
            self._collect()
        wanted = segment_size(size, self.settings)
        block = self._ask_device(pool, size, wanted)
        if block is None and self._release_oversize(pool, size):
            block = self._ask_device(pool, size, wanted)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_device(pool, size, wanted)
        if block is None:
            raise OutOfMemoryError(wanted)
        return block

    def _ask_device(self, pool: Pool, size: int, wanted: int) -> Block | None:
        """A new segment or newly mapped granules, if the capacity allows (``alloc_block``)."""
        if not self.memory.has_room(wanted):
            return None
        if self._expandable:
            granule = SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes
            return self.memory.expand(pool, size, granule)
        return self.memory.segment(pool, wanted)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back segments above the split limit, as many as the request needs.

        ``release_available_cached_blocks``, as torch 2.9 has it: blocks of expandable segments stay.
        """
        limit = self._split_limit
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        place = pool.fitting(wanted)
        if place < len(pool.keys) and pool.blocks[pool.keys[place]].segment is None:
            self.memory.release(pool.blocks[pool.keys[place]])
            return True
        released = 0
        for key in reversed(pool.keys[:place]):
            block = pool.blocks[key]
            if released >= wanted or block.size < limit:
                break
            if block.segment is None:
                released += block.size
                self.memory.release(block)
        return released >= wanted

    def _collect(self) -> None:
        """Give back the segments that were free for longest (``garbage_collect_cached_blocks``)."""
        capacity = self.memory.capacity_bytes
        assert capacity is not None, "nothing is collected without a capacity"
        surplus = self.memory.reserved_bytes - int(self.settings.garbage_collection_threshold * capacity)
        pools = [large for (_, pool), (_, large) in sorted(self._lanes.items()) if pool == DEFAULT_POOL]
        idle = [large.blocks[key] for large in pools for key in large.keys]
        idle = [block for block in idle if block.whole and block.segment is None]
        while surplus > 0 and idle:
            ages = [self._searches - block.idle_since for block in idle]
            average = sum(ages) / len(idle)
            for block, age in zip(idle, ages, strict=True):
                if age >= average:
                    surplus -= block.size
                    self.memory.release(block)
            idle = [block for block, age in zip(idle, ages, strict=True) if age < average]


def _least_expandable(pool: Pool, place: int) -> int:
    """From a block of an expandable segment on, the place of the one that could grow least.

    A block before unmapped addresses counts with them: it is the segment's end, kept for what needs it.
    """
    keys, blocks = pool.keys, pool.blocks
    block = blocks[keys[place]]
    room = _expandable_size(block)
    while block.segment is not None and place + 1 < len(keys):
        block = blocks[keys[place + 1]]
        following = _expandable_size(block)
        if following >= room:
            break
        place, room = place + 1, following
    return place


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size
