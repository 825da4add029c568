"""Repeats: minimum, median, maximum, and no claim that they do not support."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loadpeak_exporter.ab.statistics import Spread, claim, spread, statistics
from tests.exporter.ab.making import change, evidence, experiment, with_rank, with_startup
from tests.fakes import MiB


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 1, 2], Spread(count=3, minimum=1, median=2, maximum=3)),
        ([4, None, 1], Spread(count=2, minimum=1, median=2.5, maximum=4)),
        ([None], None),
        ([], None),
    ],
)
def test_spread_is_of_the_readings_that_are_there(
    values: Sequence[float | None], expected: Spread | None
) -> None:
    assert spread(values) == expected


@pytest.mark.parametrize(
    ("baseline", "fix", "words"),
    [
        ([10, 12], [11, 13], "the ranges overlap: no difference shown"),
        ([10, 12], [12, 13], "the ranges overlap"),
        ([10, 12], [5, 6], "too few repeats for a claim: chance alone does this 1 time in 3"),
        ([10, 11, 12], [5, 6, 7], "too few repeats for a claim: chance alone does this 1 time in 10"),
        ([10, 11, 12, 13], [5, 6, 7, 8], "faster: the ranges do not overlap"),
        ([5, 6, 7, 8], [10, 11, 12, 13], "slower: the ranges do not overlap"),
        ([5, 6, 7, 8], [10, 11, 12], "too few repeats"),
        ([5, 6, 7, 8], [10], "a single repeat supports no claim"),
        ([5, 6], [5], "a single repeat supports no claim"),
        ([], [1.0], "no times"),
    ],
)
def test_difference_of_times_is_claimed_only_where_repeats_support_it(
    baseline: Sequence[float], fix: Sequence[float], words: str
) -> None:
    assert claim(baseline, fix).startswith(words)


def test_every_arm_has_its_spread_over_the_worst_ranks(tmp_path: Path) -> None:
    plan = experiment(pairs=3)
    found = change(evidence(tmp_path, plan, ranks=2), "release", 2, with_rank(1, load_peak_bytes=999 * MiB))
    baseline, release = statistics(plan, found)
    assert baseline.memory["load peak"] == Spread(
        count=3, minimum=720 * MiB, median=720 * MiB, maximum=720 * MiB
    )
    assert release.memory["load peak"] == Spread(
        count=3, minimum=630 * MiB, median=630 * MiB, maximum=999 * MiB
    )
    assert release.times["until ready"] == Spread(count=3, minimum=41, median=42, maximum=43)
    assert release.claims["until ready"] == "the ranges overlap: no difference shown"
    assert (release.startups, release.ready) == (3, 3)
    assert baseline.place is not None
    assert baseline.place.kind == "across layers"


def test_times_are_those_of_startups_that_became_ready(tmp_path: Path) -> None:
    plan = experiment(pairs=2)
    found = change(
        evidence(tmp_path, plan), "release", 1, with_startup(error="killed", ready_after_seconds=1.0)
    )
    release = statistics(plan, found)[1]
    assert release.times["until ready"] == Spread(count=1, minimum=42, median=42, maximum=42)
    assert (release.startups, release.ready) == (2, 1)
