"""Questions, their ranking, the recommendation, and what explains the peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadpeak.allocator.replay import LayerFigures, Outcome
from loadpeak.allocator.sizes import MIB
from loadpeak.errors import SettingError
from loadpeak.snapshot import read
from loadpeak.whatif import advice, chart, source, why
from loadpeak.whatif.questions import Answer, Question, ask, combinations, ranked, recorded
from loadpeak.whatif.source import Source
from tests.whatif.making import CONF, Startup


@pytest.fixture
def run(tmp_path: Path) -> Source:
    path = Startup(layers=8).write(tmp_path)
    return source.build(read(path), path)


def test_without_a_question_what_usually_matters_is_tried(run: Source) -> None:
    asked = combinations(run, [], [], [], [None])
    assert len(asked) == len(set(asked)) == 8
    assert {question.alloc_conf for question in asked} == {CONF, ""}
    assert {question.release for question in asked} == {"off", "moe-layer"}


def test_combinations_are_those_of_what_is_asked(run: Source) -> None:
    asked = combinations(run, ["", CONF], ["layer"], [], [1 << 30, 2 << 30])
    assert len(asked) == 4
    assert all(question.release == "layer" and not question.keep_split_limit for question in asked)


def test_what_is_not_asked_stays_as_it_was(run: Source) -> None:
    assert combinations(run, [], ["moe-layer"], [], [None]) == [Question(CONF, "moe-layer")]


def test_cache_grows_across_layers_and_each_fix_helps(run: Source) -> None:
    was, released, kept = ask(
        run,
        [
            recorded(run, None),
            Question(CONF, "moe-layer"),
            Question(CONF, keep_split_limit=True),
        ],
    )
    found = advice.growth(was.outcome)
    assert found.where == "across"
    assert found.layer_bytes > 0
    assert released.outcome.peak_reserved_bytes < was.outcome.peak_reserved_bytes
    assert kept.outcome.peak_reserved_bytes < was.outcome.peak_reserved_bytes


def test_answers_come_in_the_order_of_the_questions_also_in_parallel(run: Source) -> None:
    questions = combinations(run, [], [], [], [None])
    assert [answer.question for answer in ask(run, questions)] == questions


def test_unusable_question_is_an_error_before_anything_runs(run: Source) -> None:
    with pytest.raises(SettingError, match="max_split_size_mb"):
        ask(run, [Question("max_split_size_mb:1")])
    with pytest.raises(SettingError, match="release"):
        ask(run, [Question(CONF, "sometimes")])


def test_capacity_decides_whether_it_fits(run: Source) -> None:
    tight, wide, none = ask(run, [Question(CONF, capacity_bytes=size) for size in (64 * MIB, 4 << 30, None)])
    assert (tight.fits, wide.fits, none.fits) == (False, True, None)
    assert (tight.margin_bytes, none.margin_bytes) == (None, None)
    assert wide.margin_bytes == (4 << 30) - wide.outcome.peak_reserved_bytes


def answer(peak: int, *, calls: int = 1, failed: bool = False, **question: object) -> Answer:
    outcome = Outcome(
        peak_reserved_bytes=peak * MIB,
        peak_allocated_bytes=50 * MIB,
        end_reserved_bytes=0,
        end_allocated_bytes=0,
        retries=0,
        calls=calls,
        layers=(),
        failed_bytes=2 * MIB if failed else None,
    )
    return Answer(Question(**{"alloc_conf": CONF, **question}), outcome, 0)  # type: ignore[arg-type]


def test_ranking_puts_what_fits_first_then_the_lowest_peak() -> None:
    size = 100 * MIB
    one, two, three = (
        answer(50, failed=True, capacity_bytes=size),
        answer(90, capacity_bytes=size),
        answer(80, capacity_bytes=size),
    )
    assert ranked([one, two, three]) == [three, two, one]


def test_of_peaks_alike_the_one_that_changes_least_is_recommended() -> None:
    was = answer(200)
    both = answer(100, alloc_conf="", release="moe-layer")
    one = answer(100, calls=9, release="moe-layer")
    assert advice.best([both, one, was], was.question) is one
    assert "LOADPEAK_CACHE_RELEASE=moe-layer" in advice.recommendation([both, one, was], was)
    assert "200 MiB to 100 MiB, by 50%" in advice.recommendation([both, one, was], was)


def test_nothing_better_is_said_so() -> None:
    was = answer(100)
    assert advice.recommendation([was, answer(99, release="layer")], was).startswith("Leave the settings")


def test_what_lets_it_start_is_recommended_with_its_room() -> None:
    size = 150 * MIB
    was = answer(140, failed=True, capacity_bytes=size)
    fix = answer(120, release="layer", capacity_bytes=size)
    assert "it fits then with 30 MiB to spare" in advice.recommendation([was, fix], was)
    assert advice.recommendation([was], was).startswith("Nothing that was asked fits into 150 MiB")


def outcome_of(windows: list[tuple[int, int, int]], live: int = 100) -> Outcome:
    """Windows of reserved at the end, live at the end and reserved peak, MiB: before, layers, after."""
    count = len(windows)
    return Outcome(
        peak_reserved_bytes=max(peak for _, _, peak in windows) * MIB,
        peak_allocated_bytes=live * MIB,
        end_reserved_bytes=0,
        end_allocated_bytes=0,
        retries=0,
        calls=0,
        layers=tuple(
            LayerFigures(
                layer=None if place in (0, count - 1) else place - 1,
                allocated_bytes=held * MIB,
                reserved_bytes=reserved * MIB,
                allocated_peak_bytes=held * MIB,
                reserved_peak_bytes=peak * MIB,
            )
            for place, (reserved, held, peak) in enumerate(windows)
        ),
    )


@pytest.mark.parametrize(
    ("windows", "where", "layer"),
    [
        ([(100, 100, 100), (140, 100, 140), (180, 100, 180), (220, 100, 220), (120, 100, 120)], "across", 2),
        ([(100, 100, 100), (300, 100, 300), (302, 100, 302), (304, 100, 304), (120, 100, 120)], "inside", 0),
        ([(100, 100, 100), (110, 100, 110), (120, 100, 400), (120, 100, 120), (120, 100, 120)], "inside", 1),
        (
            [(300, 100, 300), (300, 100, 310), (300, 100, 310), (300, 100, 310), (120, 100, 120)],
            "before",
            None,
        ),
        (
            [(300, 100, 400), (300, 100, 310), (300, 100, 310), (300, 100, 310), (120, 100, 120)],
            "before",
            None,
        ),
        (
            [(100, 100, 100), (110, 100, 110), (110, 100, 110), (110, 100, 110), (120, 100, 200)],
            "after",
            None,
        ),
        (
            [(100, 100, 100), (100, 100, 101), (100, 100, 101), (100, 100, 101), (100, 100, 101)],
            "nowhere",
            None,
        ),
    ],
)
def test_growth_across_layers_is_told_from_growth_inside_one(
    windows: list[tuple[int, int, int]], where: str, layer: int | None
) -> None:
    found = advice.growth(outcome_of(windows))
    assert (found.where, found.layer) == (where, layer)


def test_growth_is_the_same_for_each_layer() -> None:
    windows = [(100, 100, 100), *((100 + 40 * n, 100, 100 + 40 * n) for n in range(1, 9)), (100, 100, 100)]
    assert advice.growth(outcome_of(windows)).layer_bytes == 40 * MIB


def test_peak_is_explained_by_layers_and_sizes(run: Source) -> None:
    was = recorded(run, None)
    [found] = ask(run, [was])
    device = run.devices[0]
    peak = found.outcome.peak_reserved_bytes
    seen = why.explain(device.history, was.scenario(device.changes), device.boundaries, peak)
    assert seen.reserved_bytes == peak
    assert seen.live_bytes + seen.returnable_bytes + seen.pinned_bytes == peak
    assert sum(hold.live_bytes for hold in seen.holds) == seen.live_bytes
    assert sum(hold.free_bytes for hold in seen.holds) == peak - seen.live_bytes
    sources = next(hold for hold in seen.holds if hold.size == 64 * MIB)
    assert sources.where == "before the layers"
    assert sources.free_bytes > 0, "weights that were converted and freed"
    kept = next(hold for hold in seen.holds if hold.size == 8 * MIB)
    assert kept.where.startswith("layers 0 to")
    assert seen.over_limit_bytes > 0


def test_small_blocks_that_pin_segments_are_named(tmp_path: Path) -> None:
    startup = Startup(layers=8)
    path = startup.write(tmp_path)
    run = source.build(read(path), path)
    device = run.devices[0]
    asked = Question("max_split_size_mb:20")
    [found] = ask(run, [asked])
    scenario = asked.scenario(device.changes)
    seen = why.explain(device.history, scenario, device.boundaries, found.outcome.peak_reserved_bytes)
    for pin in seen.pins:
        assert 0 < pin.live_bytes < pin.segments * pin.segment_bytes / 4
        assert pin.free_bytes <= seen.pinned_bytes


def test_chart_fits_its_width_and_names_what_it_draws(run: Source) -> None:
    was, fix = ask(run, [recorded(run, None), Question(CONF, "moe-layer")])
    drawn = chart.build(("recorded settings", fix.name), was.outcome.layers, fix.outcome.layers)
    for width in (40, 80, 140):
        lines = chart.to_text(drawn, width).plain.splitlines()
        assert max(map(len, lines[:-3])) <= width
        assert "●" in lines[0], "the recorded peak is the top"
    page = chart.to_html(drawn, "Set <this>.")
    assert page.count("<polyline") == 3
    assert "&lt;this&gt;" in page
    assert "http" not in page, "the page needs nothing else"
