"""Random programs under random settings: whatever is asked, no byte is lost and none is given out twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loadpeak.allocator.model import DEFAULT_POOL, AllocatorModel, Lane, OutOfMemoryError
from loadpeak.allocator.pools import Block
from loadpeak.allocator.settings import parse
from loadpeak.allocator.sizes import MIB, MIN_BLOCK

CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:64,max_non_split_rounding_mb:30",
    "expandable_segments:True,max_split_size_mb:20",
    "expandable_segments:True,large_segment_size_mb:12",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.5",
]
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 48 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB, 21 * MIB]),
)
LANES: list[Lane] = [(0, DEFAULT_POOL), (7, DEFAULT_POOL), (0, (0, 1))]
CAPACITY = 256 * MIB
STEP = st.one_of(
    st.tuples(st.just("alloc"), SIZES),
    st.tuples(st.just("free"), st.integers(0, 1 << 16)),
    st.tuples(st.just("empty"), st.just(0)),
    st.tuples(st.just("lane"), st.integers(0, len(LANES) - 1)),
    st.tuples(st.just("conf"), st.integers(0, len(CONFS) - 1)),
)


class Program:
    """A model and the blocks it has given out."""

    def __init__(self, conf: str, capacity: int | None = CAPACITY) -> None:
        self.model = AllocatorModel(parse(conf), capacity)
        self.live: list[Block] = []

    def run(self, steps: list[tuple[str, int]]) -> None:
        for what, value in steps:
            if what == "alloc":
                self._alloc(value)
            elif what == "free" and self.live:
                self.model.free(self.live.pop(value % len(self.live)))
            elif what == "empty":
                self.model.empty_cache()
            elif what == "lane":
                self.model.use_lane(LANES[value])
            elif what == "conf":
                self.model.apply(parse(CONFS[value]))
            check(self)

    def _alloc(self, size: int) -> None:
        try:
            block = self.model.alloc(size)
        except OutOfMemoryError:
            return
        assert block.size >= size
        self.live.append(block)


def chains(program: Program) -> Iterator[list[Block]]:
    """Every segment as the blocks that it consists of."""
    pools = program.model.all_pools()
    blocks = [*program.live, *(b for pool in pools for b in (*pool.blocks.values(), *pool.ranges.values()))]
    for block in blocks:
        if block.prev is None:
            chain = [block]
            while chain[-1].next is not None:
                assert chain[-1].next.prev is chain[-1]
                chain.append(chain[-1].next)
            yield chain


def check(program: Program) -> None:
    model = program.model
    mapped = 0
    seen: set[int] = set()
    spans: list[tuple[int, int]] = []
    for chain in chains(program):
        seen |= {id(block) for block in chain}
        spans.append((chain[0].address, chain[-1].address + chain[-1].size))
        mapped += sum(block.size for block in chain if block.mapped)
        for before, after in pairwise(chain):
            assert before.address + before.size == after.address, "a byte is lost, or in two blocks"
            assert not (before.free and after.free and before.mapped == after.mapped), "not coalesced"
    assert all(id(block) in seen for block in program.live)
    for (_, end), (begin, _) in pairwise(sorted(spans)):
        assert end <= begin, "two segments overlap"
    assert mapped == model.memory.reserved_bytes
    assert model.allocated_bytes == sum(block.size for block in program.live)
    assert model.memory.reserved_bytes >= model.allocated_bytes
    if model.memory.capacity_bytes is not None:
        assert model.memory.reserved_bytes <= model.memory.capacity_bytes + 20 * MIB
    for pool in model.all_pools():
        assert sorted(pool.keys) == pool.keys
        assert len(pool.keys) == len(pool.blocks)
        assert all(block.free and block.mapped for block in pool.blocks.values())
        assert all(block.free and not block.mapped for block in pool.ranges.values())


@given(conf=st.sampled_from(CONFS), steps=st.lists(STEP, max_size=80))
@settings(max_examples=300, deadline=None)
def test_no_overlap_and_no_lost_byte_after_every_step(conf: str, steps: list[tuple[str, int]]) -> None:
    Program(conf).run(steps)


@given(conf=st.sampled_from(CONFS), steps=st.lists(STEP.filter(lambda step: step[0] != "lane"), max_size=80))
@settings(max_examples=150, deadline=None)
def test_everything_goes_back_once_all_is_freed(conf: str, steps: list[tuple[str, int]]) -> None:
    program = Program(conf)
    program.run(steps)
    for block in program.live:
        program.model.free(block)
    program.live.clear()
    program.model.empty_cache()
    check(program)
    assert program.model.memory.reserved_bytes == 0


@given(size=SIZES)
def test_block_is_a_multiple_of_512_bytes(size: int) -> None:
    block = AllocatorModel(parse("")).alloc(size)
    assert block.size % MIN_BLOCK == 0
