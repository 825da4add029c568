"""Memory that comes from the device and goes back to it: whole segments, or granules that are mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from loadpeak.allocator.pools import Block, ExpandableSegment
from loadpeak.allocator.sizes import SEGMENT_STEP

if TYPE_CHECKING:
    from loadpeak.allocator.pools import Pool

FIRST_ADDRESS = 1 << 50
"""Above every address that a recorded history can hold."""
ADDRESS_SPACE = 1 << 43
"""Addresses of an expandable segment. PyTorch reserves 9/8 of the device's memory, which a load that stays
within the device does not use up."""

SegmentEvent = Callable[[str, int, int], None]
"""Told the action as PyTorch's history names it, the size and the address."""


class DeviceMemory:
    """What one process has of a device's memory through its caching allocator.

    Addresses are made up: the device's own choice is not known. Only their order matters, and only between
    free blocks of one size.

    Attributes:
        reserved_bytes: what it has now.
        reserved_peak_bytes: the most it had since the peak was last reset.
        capacity_bytes: the most it may have, or nothing for no limit.
        calls: requests to the device for memory and back (``num_device_alloc`` + ``num_device_free``).
    """

    def __init__(self, capacity_bytes: int | None, on_event: SegmentEvent | None = None) -> None:
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.capacity_bytes = capacity_bytes
        self.calls = 0
        self._on_event = on_event
        self._next_address = FIRST_ADDRESS

    def adopt(self, size: int) -> None:
        """Count memory that was there before."""
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def has_room(self, size: int) -> bool:
        """Whether a request of this size stays within the capacity (``alloc_block``)."""
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def segment(self, pool: Pool, size: int) -> Block:
        """A new segment as one block (``alloc_block``)."""
        block = Block(self._addresses(size), size, pool, None)
        self._count("segment_alloc", size, block.address)
        return block

    def _addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += (size + SEGMENT_STEP - 1) & -SEGMENT_STEP
        return address

    def _count(self, action: str, size: int, address: int) -> None:
        self.calls += 1
        self.reserved_bytes += size if action in ("segment_alloc", "segment_map") else -size
        if self.reserved_bytes > self.reserved_peak_bytes:
            self.reserved_peak_bytes = self.reserved_bytes
        if self._on_event is not None:
            self._on_event(action, size, address)

    # ── expandable segments ───────────────────────────────────────────────────────────────────────

    def expand(self, pool: Pool, size: int, granule: int) -> Block | None:
        """A block of at least this size, mapped where it is not (``try_allocate_expandable_block``).

        Nothing for a size that no segment has addresses for.
        """
        if size > ADDRESS_SPACE - granule:
            return None
        block = self._lowest_room(pool, size, granule)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            following = block.next
            assert following is not None, "free addresses end before the size that was looked for"
            block = self._map(following, min(size - block.size, following.size))
        pool.remove(block)
        return block

    def _lowest_room(self, pool: Pool, size: int, granule: int) -> Block:
        """The lowest free or unmapped block that begins enough free addresses (``find_expandable_block``)."""
        for address in pool.unmapped:
            first = pool.ranges[address]
            if first.prev is not None and first.prev.free:
                first = first.prev
            room = 0
            block: Block | None = first
            while room < size and block is not None and block.free:
                room += block.size
                block = block.next
            if room >= size:
                return first
        space = self.addresses_from(self._addresses(ADDRESS_SPACE), pool, granule)
        pool.insert_unmapped(space)
        return space

    @staticmethod
    def addresses_from(address: int, pool: Pool, granule: int) -> Block:
        """A new expandable segment with nothing mapped, not in its pool's set yet."""
        space = ADDRESS_SPACE // granule * granule
        return Block(address, space, pool, ExpandableSegment(address, granule), mapped=False)

    def _map(self, block: Block, size: int) -> Block:
        """Put memory behind the first granules of an unmapped range, and join it to its free neighbours.

        ``map_block`` and ``ExpandableSegment::map``.
        """
        pool, segment = block.pool, block.segment
        assert segment is not None, "only addresses of an expandable segment can be unmapped"
        size = -(-size // segment.granule) * segment.granule
        pool.remove_unmapped(block)
        if size < block.size:
            rest, block = block, block.split_off(size)
            pool.insert_unmapped(rest)
        block.mapped = True
        address = block.address
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        pool.insert(block)
        self._count("segment_map", size, address)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the granules that lie wholly inside a free block (``unmap_block``)."""
        pool, segment = block.pool, block.segment
        assert segment is not None, "only an expandable segment can be unmapped"
        offset = block.address - segment.base
        begin = segment.base - (-offset // segment.granule) * segment.granule
        end = segment.base + (offset + block.size) // segment.granule * segment.granule
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            pool.insert(block.split_off(begin - block.address))
        if end < block.address + block.size:
            rest, block = block, block.split_off(end - block.address)
            pool.insert(rest)
        block.mapped = False
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        self._count("segment_unmap", end - begin, begin)
        if not block.whole:
            pool.insert_unmapped(block)

    # ── giving back ───────────────────────────────────────────────────────────────────────────────

    def release(self, block: Block) -> None:
        """Give a free block that is a whole segment back (``release_block``)."""
        block.pool.remove(block)
        self._count("segment_free", block.size, block.address)

    def release_all(self, pool: Pool) -> None:
        """Give back every free segment and every free granule of a pool (``release_blocks``)."""
        free = [pool.blocks[key] for key in pool.keys]
        for block in free:
            if block.segment is None and block.whole:
                self.release(block)
        for block in free:
            if block.segment is not None:
                self._unmap(block)
