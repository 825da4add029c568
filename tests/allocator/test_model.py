"""One rule of the allocator a test."""

import pytest

from loadpeak.allocator.model import AllocatorModel, OutOfMemoryError
from loadpeak.allocator.settings import parse
from loadpeak.allocator.sizes import MIB

EXPANDABLE = "expandable_segments:True"


class Watched:
    """A model and what it asked of the device."""

    def __init__(self, conf: str = "", capacity: int | None = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.model = AllocatorModel(
            parse(conf), capacity, lambda what, size, _: self.events.append((what, size))
        )

    def since(self) -> list[tuple[str, int]]:
        events, self.events = self.events, []
        return events


def test_small_requests_share_a_segment_of_2_mib() -> None:
    watched = Watched()
    for _ in range(4):
        watched.model.alloc(512 << 10)
    assert watched.since() == [("segment_alloc", 2 * MIB)]


def test_smallest_block_that_fits_is_taken() -> None:
    watched = Watched()
    large, small = watched.model.alloc(40 * MIB), watched.model.alloc(30 * MIB)
    place = small.address
    watched.model.free(large)
    watched.model.free(small)
    assert watched.model.alloc(29 * MIB).address == place


def test_freed_neighbours_become_one_block() -> None:
    watched = Watched()
    blocks = [watched.model.alloc(4 * MIB) for _ in range(5)]
    for block in blocks:
        watched.model.free(block)
    watched.since()
    watched.model.alloc(20 * MIB)
    assert watched.since() == []


def test_remainder_of_a_large_block_is_split_off_only_above_1_mib() -> None:
    watched = Watched()
    watched.model.free(watched.model.alloc(20 * MIB))
    assert watched.model.alloc(19 * MIB).size == 20 * MIB
    watched = Watched(EXPANDABLE)
    watched.model.free(watched.model.alloc(20 * MIB))
    assert watched.model.alloc(19 * MIB).size == 19 * MIB


def test_block_above_the_split_limit_serves_no_smaller_request() -> None:
    watched = Watched("max_split_size_mb:20")
    watched.model.free(watched.model.alloc(64 * MIB))
    watched.since()
    watched.model.alloc(12 * MIB)
    assert watched.since() == [("segment_alloc", 12 * MIB)]


def test_block_above_the_split_limit_serves_a_request_close_to_its_size() -> None:
    watched = Watched("max_split_size_mb:20")
    watched.model.free(watched.model.alloc(64 * MIB))
    watched.since()
    assert watched.model.alloc(45 * MIB).size == 64 * MIB
    watched = Watched("max_split_size_mb:20,max_non_split_rounding_mb:10")
    watched.model.free(watched.model.alloc(64 * MIB))
    assert watched.model.alloc(45 * MIB).size == 46 * MIB


def test_expandable_segment_grows_by_its_granule() -> None:
    watched = Watched(EXPANDABLE)
    watched.model.alloc(30 * MIB)
    watched.model.alloc(8 * MIB)
    watched.model.alloc(8 * MIB)
    assert watched.since() == [("segment_map", 40 * MIB), ("segment_map", 20 * MIB)]


def test_end_of_an_expandable_segment_is_kept_for_what_needs_it() -> None:
    watched = Watched(EXPANDABLE)
    hole, wall = watched.model.alloc(18 * MIB), watched.model.alloc(10 * MIB)
    assert wall.address > hole.address
    place = hole.address
    watched.model.free(hole)
    assert watched.model.alloc(12 * MIB).address == place, "the end, with 12 MiB, fits better but can grow"


def test_emptied_cache_unmaps_whole_granules_and_frees_whole_segments() -> None:
    watched = Watched(EXPANDABLE)
    watched.model.free(watched.model.alloc(50 * MIB))
    kept = watched.model.alloc(5 * MIB)
    watched.since()
    watched.model.empty_cache()
    assert watched.since() == [("segment_unmap", 40 * MIB)]
    watched.model.free(kept)
    watched = Watched()
    watched.model.free(watched.model.alloc(50 * MIB))
    watched.model.alloc(5 * MIB)
    watched.since()
    watched.model.empty_cache()
    assert watched.since() == []


def test_unmapped_hole_is_filled_before_the_end() -> None:
    watched = Watched(EXPANDABLE)
    hole, _ = watched.model.alloc(40 * MIB), watched.model.alloc(20 * MIB)
    place = hole.address
    watched.model.free(hole)
    watched.model.empty_cache()
    assert watched.model.alloc(30 * MIB).address == place


def test_everything_goes_back_before_a_request_fails() -> None:
    watched = Watched(capacity=100 * MIB)
    watched.model.free(watched.model.alloc(60 * MIB))
    watched.model.alloc(80 * MIB)
    assert watched.since() == [
        ("segment_alloc", 60 * MIB),
        ("segment_free", 60 * MIB),
        ("segment_alloc", 80 * MIB),
    ]
    assert watched.model.retries == 1
    with pytest.raises(OutOfMemoryError) as caught:
        watched.model.alloc(5 * MIB + 16 * MIB)
    assert caught.value.size == 22 * MIB


def test_oversize_segments_go_back_first_and_no_more_than_needed() -> None:
    watched = Watched("max_split_size_mb:20", capacity=110 * MIB)
    for block in [watched.model.alloc(30 * MIB), watched.model.alloc(60 * MIB)]:
        watched.model.free(block)
    watched.since()
    watched.model.alloc(100 * MIB)
    assert watched.model.retries == 1, "neither segment is large enough, and both together are not either"
    watched = Watched("max_split_size_mb:20", capacity=110 * MIB)
    for block in [watched.model.alloc(30 * MIB), watched.model.alloc(60 * MIB)]:
        watched.model.free(block)
    watched.since()
    watched.model.alloc(24 * MIB + 512)
    assert watched.since() == [], "a segment within 20 MiB of the request serves it"
    watched.model.alloc(24 * MIB + 512)
    assert watched.since() == [("segment_free", 60 * MIB), ("segment_alloc", 26 * MIB)]
    assert watched.model.retries == 0


def test_collection_gives_back_what_was_free_for_longest() -> None:
    watched = Watched("garbage_collection_threshold:0.5", capacity=200 * MIB)
    for size in (64, 80):
        watched.model.free(watched.model.alloc(size * MIB))
    watched.since()
    watched.model.alloc(100 * MIB)
    assert watched.since() == [("segment_free", 64 * MIB), ("segment_alloc", 100 * MIB)]
    assert watched.model.retries == 0


def test_streams_do_not_share_blocks() -> None:
    watched = Watched()
    watched.model.free(watched.model.alloc(30 * MIB))
    watched.model.use_lane((7, (0, 0)))
    watched.since()
    watched.model.alloc(30 * MIB)
    assert watched.since() == [("segment_alloc", 30 * MIB)]


def test_private_pool_keeps_what_it_has() -> None:
    watched = Watched()
    watched.model.use_lane((0, (0, 1)))
    watched.model.free(watched.model.alloc(30 * MIB))
    watched.since()
    watched.model.empty_cache()
    assert watched.since() == []
    watched.model.use_lane((0, (0, 0)))
    watched.model.alloc(30 * MIB)
    assert watched.since() == [("segment_alloc", 30 * MIB)]


def test_blocks_of_expandable_segments_are_left_alone_once_they_are_off() -> None:
    watched = Watched(EXPANDABLE)
    watched.model.free(watched.model.alloc(30 * MIB))
    watched.model.apply(parse(""))
    watched.since()
    watched.model.alloc(30 * MIB)
    assert watched.since() == [("segment_alloc", 30 * MIB)]


def test_request_beyond_all_addresses_fails() -> None:
    with pytest.raises(OutOfMemoryError):
        Watched(EXPANDABLE).model.alloc(1 << 60)
