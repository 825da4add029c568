"""Blocks, and the pools that hold the free ones sorted by size and address."""

from __future__ import annotations

from bisect import bisect_left, insort

ADDRESS_BITS = 64
"""A free block's key is its size above so many bits of address, so keys sort as the allocator's sets do."""


class ExpandableSegment:
    """A range of addresses that memory is mapped into, granule by granule (``ExpandableSegment``)."""

    __slots__ = ("base", "granule")

    def __init__(self, base: int, granule: int) -> None:
        self.base, self.granule = base, granule


class Block:
    """A range of addresses inside a segment, in use or free (``Block``).

    Attributes:
        segment: the expandable segment it lies in, or nothing where the device was asked for a whole one.
        mapped: false for addresses of an expandable segment with no memory behind them.
        idle_since: number of searches in the large pool when it became free, for the garbage collection.
    """

    __slots__ = ("address", "free", "idle_since", "mapped", "next", "pool", "prev", "segment", "size")

    def __init__(
        self, address: int, size: int, pool: Pool, segment: ExpandableSegment | None, mapped: bool = True
    ) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.mapped = mapped
        self.free = True
        self.idle_since = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.prev is None and self.next is None

    def split_off(self, size: int) -> Block:
        """Make its first ``size`` bytes a block of their own, before it."""
        head = Block(self.address, size, self.pool, self.segment, self.mapped)
        head.next = self
        head.prev = before = self.prev
        if before is not None:
            before.next = head
        self.prev = head
        self.address += size
        self.size -= size
        return head


class Pool:
    """The free blocks of one size class and stream, and the unmapped ranges of its segments (``BlockPool``).

    PyTorch keeps the streams of a pool in one set, sorted by stream first; no rule looks beyond a stream, so
    each has a pool here.

    Attributes:
        keys: size and address of each free block, sorted.
        blocks: the blocks by key.
        unmapped: addresses of the unmapped ranges, sorted.
        ranges: those ranges by address.
    """

    __slots__ = ("blocks", "keys", "ranges", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[int] = []
        self.ranges: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add a free block."""
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def insert_unmapped(self, block: Block) -> None:
        """Add an unmapped range."""
        insort(self.unmapped, block.address)
        self.ranges[block.address] = block

    def remove_unmapped(self, block: Block) -> None:
        """Take an unmapped range out."""
        del self.unmapped[bisect_left(self.unmapped, block.address)]
        del self.ranges[block.address]

    def merge(self, block: Block, other: Block | None) -> None:
        """Join a free neighbour of the same kind to a block that is in no set (``try_merge_blocks``)."""
        if other is None or not other.free or other.mapped != block.mapped:
            return
        if other.mapped:
            self.remove(other)
        else:
            self.remove_unmapped(other)
        if block.prev is other:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size

    def fitting(self, size: int) -> int:
        """Place in ``keys`` of the smallest block of at least this size."""
        return bisect_left(self.keys, size << ADDRESS_BITS)
