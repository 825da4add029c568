"""What loadpeak's own record adds to a history: layers, changes of the settings, the policy in force."""

from pathlib import Path

import pytest

from loadpeak.allocator.replay import Change
from loadpeak.errors import CommandError
from loadpeak.snapshot import read
from loadpeak.whatif import source
from loadpeak.whatif.source import Source, read_timeline
from tests.whatif.making import CONF, Startup


def build(path: Path) -> Source:
    return source.build(read(path), path)


def test_layers_come_from_the_record(tmp_path: Path) -> None:
    found = build(Startup(layers=3).write(tmp_path))
    assert found.layers_from == "record"
    assert [boundary.layer for boundary in found.devices[0].boundaries] == [0, 1, 2]
    assert found.layers_expected == 3


def test_boundary_lies_between_a_conversion_and_the_next(tmp_path: Path) -> None:
    startup = Startup(layers=2)
    first, second = build(startup.write(tmp_path)).devices[0].boundaries
    assert startup.recorder.events[first.event - 1]["action"] == "free_completed"
    assert startup.recorder.events[first.event]["size"] == 30 << 20
    assert first.event == second.begin


def test_changes_of_the_settings_come_from_the_record(tmp_path: Path) -> None:
    startup = Startup(layers=2)
    found = build(startup.write(tmp_path))
    assert found.alloc_conf == CONF
    assert found.timeline_from == "record"
    end = len(startup.recorder.events) - 3
    assert found.devices[0].changes == (Change(0, end, "max_split_size_mb:20"),)


def test_policy_in_force_and_its_releases_are_known(tmp_path: Path) -> None:
    found = build(Startup(layers=2, releases=True).write(tmp_path))
    assert found.release == "moe-layer"
    assert all(boundary.released for boundary in found.devices[0].boundaries)


def test_history_that_filled_up_is_said_to_be_cut_off(tmp_path: Path) -> None:
    startup = Startup(layers=2)
    assert build(startup.write(tmp_path, entries_limit=len(startup.recorder.events))).cut_off
    assert not build(Startup(layers=2).write(tmp_path)).cut_off


def test_torn_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = Startup(layers=2).write(tmp_path)
    journal = tmp_path / "rank-0.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    assert len(build(path).devices[0].boundaries) == 2


def test_snapshot_of_somebody_else_has_no_record(tmp_path: Path) -> None:
    path = Startup().write(tmp_path).rename(tmp_path / "mine.pickle.gz")
    found = build(path)
    assert (found.layers_from, found.timeline_from, found.release) == ("inferred", "nothing", "off")
    assert [boundary.layer for boundary in found.devices[0].boundaries] == [0, 1, 2, 3, 4, 5]


def test_timeline_given_by_hand_takes_the_place_of_the_recorded(tmp_path: Path) -> None:
    path = Startup().write(tmp_path)
    given = (Change(3, 9, "max_split_size_mb:64"),)
    found = source.build(read(path), path, given)
    assert found.devices[0].changes == given
    assert found.timeline_from == "file"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '[{"from_event": 1}]',
        '[{"from_event": 9, "to_event": 3, "alloc_conf": ""}]',
        '[{"from_event": -1, "to_event": 3, "alloc_conf": ""}]',
        '[{"from_event": "1", "to_event": 3, "alloc_conf": ""}]',
        '[{"from_event": 1, "to_event": 3, "alloc_conf": "nonsense"}]',
    ],
)
def test_timeline_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(CommandError, match=r"the timeline .*timeline\.json"):
        read_timeline(path)


@pytest.mark.parametrize("time", [b"at_wall_seconds", b"at_seconds", b"duration_seconds"])
def test_lines_with_times_that_no_clock_shows_are_left_out(tmp_path: Path, time: bytes) -> None:
    path = Startup(layers=6).write(tmp_path)
    journal = tmp_path / "rank-0.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"%s":' % time, b'"%s":1e308,"x":' % time))
    assert build(path).layers_from == "inferred"


def test_timeline_of_another_history_is_refused(tmp_path: Path) -> None:
    startup = Startup(layers=2)
    path, events = startup.write(tmp_path), len(startup.recorder.events)
    source.build(read(path), path, (Change(0, events, ""),))
    with pytest.raises(CommandError, match=f"goes on to event {events + 1}; .* has {events}"):
        source.build(read(path), path, (Change(0, events + 1, ""),))
