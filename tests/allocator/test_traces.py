"""The two recorded histories under their own settings: the model does what PyTorch did, to the byte."""

from __future__ import annotations

import gc
import lzma
import pickle
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from loadpeak.allocator.history import from_trace
from loadpeak.allocator.replay import Change, Release, Replay, Scenario, conf_at, replay
from loadpeak.allocator.settings import AllocatorSettings, parse
from loadpeak.allocator.sizes import MIB
from loadpeak.snapshot import read
from loadpeak.whatif.source import DeviceRun, build

EXPANDABLE = "expandable_segments:True"
VLLM = "vllm026-awq-expandable.pickle.xz"
SM70 = "sm70-lifecycle-12layers.pickle.xz"
SCOPE = (Change(28, 418486, "max_split_size_mb:20"),)
CAP = 32 << 30


@cache
def recorded(path: Path) -> DeviceRun:
    return build(read(path), path, SCOPE if path.name == VLLM else ()).devices[0]


def own_settings(name: str) -> Scenario:
    if name == VLLM:
        return Scenario(EXPANDABLE, capacity_bytes=CAP, changes=SCOPE)
    return Scenario(f"{EXPANDABLE},max_split_size_mb:20", capacity_bytes=CAP)


@pytest.mark.parametrize(
    ("name", "peak", "live", "end", "retries"),
    [(VLLM, 32_754, 16_873, 17_256, 1), (SM70, 11_166, 5_372, 5_136, 0)],
)
def test_peak_and_retries_are_those_of_the_recorded_run(
    traces: Path, name: str, peak: int, live: int, end: int, retries: int
) -> None:
    """The second run had 2 MiB before its recording began: events alone sum up to 11,164 and 5,134."""
    run = recorded(traces / name)
    outcome = replay(run.history, own_settings(name))
    assert outcome.peak_reserved_bytes == run.history.recorded_peak_bytes == peak * MIB
    assert outcome.peak_allocated_bytes // MIB == live
    assert outcome.end_reserved_bytes == end * MIB
    assert outcome.retries == run.history.retries == retries


@pytest.mark.parametrize(("name", "events"), [(VLLM, 499), (SM70, 1_564)])
def test_every_segment_event_is_the_recorded_one(traces: Path, name: str, events: int) -> None:
    """Action, size and place: only where the device put each expandable segment is not known."""
    run = recorded(traces / name)
    ours: list[tuple[str, int, int]] = []
    Replay(run.history, own_settings(name), on_event=lambda *event: ours.append(event)).run()
    theirs = [(event.action, event.size) for event in run.history.segment_events]
    assert [event[:2] for event in ours] == theirs
    assert len(theirs) == events
    shifts = Counter(
        event.address - address
        for event, (_, _, address) in zip(run.history.segment_events, ours, strict=True)
    )
    assert len(shifts) == 2, "one shift for the small pool's segment, one for the large pool's"


@pytest.mark.parametrize(
    ("conf", "changes", "release", "peak"),
    [
        (EXPANDABLE, SCOPE, "moe-layer", 16_996),
        (EXPANDABLE, (), "off", 16_896),
        ("", SCOPE, "off", 16_982),
        ("", SCOPE, "moe-layer", 16_984),
        ("", (), "off", 16_970),
    ],
)
def test_other_settings_come_to_what_was_measured(
    traces: Path, conf: str, changes: tuple[Change, ...], release: str, peak: int
) -> None:
    """The reserved peaks of docs/results.md, each measured in a run of its own."""
    run = recorded(traces / VLLM)
    outcome = replay(run.history, Scenario(conf, Release.parse(release), CAP, changes), run.boundaries)
    assert outcome.peak_reserved_bytes == peak * MIB


@pytest.mark.parametrize(("name", "layers"), [(VLLM, 48), (SM70, 12)])
def test_layers_are_found_without_a_record(traces: Path, name: str, layers: int) -> None:
    assert [boundary.layer for boundary in recorded(traces / name).boundaries] == list(range(layers))


def test_live_memory_is_the_same_under_every_setting_but_for_unsplit_remainders(traces: Path) -> None:
    run = recorded(traces / SM70)
    peaks = [replay(run.history, Scenario(conf)).peak_allocated_bytes for conf in (EXPANDABLE, "")]
    assert abs(peaks[0] - peaks[1]) < 0.01 * peaks[0]


@pytest.mark.parametrize(("name", "cut"), [(VLLM, 200_000), (SM70, 300_000)])
def test_history_that_begins_in_the_middle_replays_the_same(traces: Path, name: str, cut: int) -> None:
    """A ring that was too small: what was there before follows from what is there at the end."""
    gc.disable()
    try:
        content = pickle.loads(lzma.decompress((traces / name).read_bytes()))
        history = from_trace(0, content["device_traces"][0][cut:], content["segments"])
        del content
    finally:
        gc.enable()
    scenario = own_settings(name)
    changes = tuple(Change(0, change.to_event - cut, change.alloc_conf) for change in scenario.changes)
    later = scenario._replace(changes=changes)
    ours: list[tuple[str, int]] = []
    judged = history.judged(lambda event: recorded_settings(later, event))
    Replay(judged, later, on_event=lambda action, size, _: ours.append((action, size))).run()
    assert ours == [(event.action, event.size) for event in history.segment_events]


def recorded_settings(scenario: Scenario, event: int) -> AllocatorSettings:
    return parse(conf_at(scenario.alloc_conf, scenario.changes, event))
