"""Conf strings as PyTorch reads them, and the sizes that follow from them."""

import pytest

from loadpeak.allocator.settings import (
    UNLIMITED,
    AllocatorSettings,
    added,
    after_setter,
    conf_string,
    difference,
    parse,
)
from loadpeak.allocator.sizes import MIB, block_size, segment_size
from loadpeak.errors import SettingError


def test_every_modelled_option_is_read() -> None:
    settings = parse(
        " expandable_segments:True, max_split_size_mb:64,max_non_split_rounding_mb:30,"
        "garbage_collection_threshold:0.8,large_segment_size_mb:40,roundup_power2_divisions:8 "
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=64 * MIB,
        max_non_split_rounding_bytes=30 * MIB,
        garbage_collection_threshold=0.8,
        large_segment_bytes=40 * MIB,
        roundup_divisions=(8,) * 16,
    )


def test_options_without_effect_on_the_model_are_taken() -> None:
    assert parse("pinned_use_background_threads:True,backend:native") == parse("")


def test_unlimited_split_size_of_a_snapshot_is_no_limit() -> None:
    """vLLM 0.26 restores 17592186044415, which is PyTorch's own maximum."""
    assert parse("max_split_size_mb:17592186044415").max_split_bytes == UNLIMITED


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ("max_split_size_mb:10", "max_split_size_mb"),
        ("expandable_segments:yes", "expandable_segments"),
        ("garbage_collection_threshold:1.5", "garbage_collection_threshold"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions"),
        ("backend:cudaMallocAsync", "backend"),
        ("per_process_memory_fraction:0.5", "per_process_memory_fraction"),
        ("no_such_option:1", "no_such_option"),
        ("expandable_segments", "expandable_segments"),
        ("max_split_size_mb:", "max_split_size_mb"),
        ("max_split_size_mb:1_000", "max_split_size_mb"),
        ("garbage_collection_threshold:0.8_1", "garbage_collection_threshold"),
        ("roundup_power2_divisions:[64:8", "roundup_power2_divisions"),
        ("roundup_power2_divisions:[[64:8]]", "roundup_power2_divisions"),
    ],
)
def test_unusable_value_is_named(conf: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        parse(conf)


def test_added_options_win() -> None:
    assert added("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb:20") == (
        "expandable_segments:True,max_split_size_mb:20"
    )


def test_difference_is_what_has_to_be_added() -> None:
    before, after = "expandable_segments:True,max_split_size_mb:64", "expandable_segments:True"
    assert difference("expandable_segments:True", "expandable_segments:True,max_split_size_mb:20") == (
        "max_split_size_mb:20"
    )
    assert parse(added(before, difference(before, after))) == parse(after)


def test_setter_puts_back_what_it_does_not_name() -> None:
    """``AcceleratorAllocatorConfig::parseArgs`` resets three options and keeps the others."""
    conf = "expandable_segments:True,max_split_size_mb:20,garbage_collection_threshold:0.5"
    assert after_setter(conf, "max_split_size_mb:64") == "expandable_segments:True,max_split_size_mb:64"


def test_settings_of_a_snapshot_are_those_in_force() -> None:
    found = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:17592186044415",
        "max_split_size": -1048576,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "roundup_power2_divisions": {"1": 0},
    }
    assert conf_string(found) == "expandable_segments:True"
    assert (
        conf_string({**found, "max_split_size": 20 * MIB}) == "expandable_segments:True,max_split_size_mb:20"
    )


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_blocks_are_multiples_of_512_bytes(requested: int, block: int) -> None:
    assert block_size(requested, parse("")) == block


@pytest.mark.parametrize(
    ("requested", "block"), [(1200, 1536), (5 * MIB + 1, 6 * MIB), (4 * MIB, 4 * MIB), (7 * MIB, 7 * MIB)]
)
def test_sizes_are_rounded_to_divisions_between_powers_of_two(requested: int, block: int) -> None:
    """1200 is too small to be rounded: four divisions of 512 bytes begin at 2048."""
    assert block_size(requested, parse("roundup_power2_divisions:4")) == block


def test_divisions_by_size() -> None:
    """The settings of PyTorch's own test (``c10/test/core/AllocatorConfig_test.cpp``)."""
    settings = parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    by_size = {mb: settings.divisions(mb * MIB) for mb in (32, 64, 128, 256, 512, 1024, 2048)}
    assert by_size == {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1}


def test_divisions_for_all_others_may_come_first() -> None:
    """PyTorch takes that order, and what follows is put on top."""
    assert parse("roundup_power2_divisions:[>:1,64:2]").roundup_divisions == (2,) * 7 + (1,) * 9


@pytest.mark.parametrize(
    ("block", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 512, 12)],
)
def test_segment_that_is_asked_for(block: int, segment: int) -> None:
    assert segment_size(block, parse("")) == segment * MIB
