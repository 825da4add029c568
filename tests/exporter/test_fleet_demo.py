"""The made-up hosts of the demo: the shipped records, cast onto V100 cards."""

import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from loadpeak_exporter import replay, serve_settings
from loadpeak_exporter.commands.demo import RECORDED
from loadpeak_exporter.fleet_demo import CARD_BYTES, RANKS, STORIES, Act, cast
from loadpeak_exporter.host import Host
from loadpeak_exporter.host_app import create_host_app
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunReader, RunStore

MIB = 1 << 20


def played(tmp_path: Path, act: Act, speed: float = 60) -> RunRecord:
    source = tmp_path / "cast"
    source.mkdir()
    cast(RECORDED / act.variant, source, act)
    for thread in replay.start(source, tmp_path, "run", speed):
        thread.join(30)
    record = RunReader(tmp_path / "runs" / "run", Host.this()).read()
    assert isinstance(record, RunRecord)
    return record


def test_baseline_leaves_a_v100_almost_no_headroom_and_the_release_much(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tight = min(rank.headroom_bytes or 0 for rank in played(tmp_path / "a", Act("baseline")).ranks)
    roomy = min(rank.headroom_bytes or 0 for rank in played(tmp_path / "b", Act("moe-layer")).ranks)
    assert 0 < tight < 1000 * MIB
    assert roomy > 15000 * MIB


def test_cast_has_four_ranks_on_four_cards(tmp_path: Path) -> None:
    run = played(tmp_path, Act("moe-layer"))
    assert run.outcome == "ready"
    assert len(run.ranks) == run.header.tp_size == RANKS
    assert len({rank.device.uuid for rank in run.ranks if rank.device}) == RANKS
    assert all(rank.device and rank.device.total_bytes == CARD_BYTES for rank in run.ranks)
    assert all(rank.layers_done == 48 for rank in run.ranks)


def test_failing_startup_ends_out_of_memory_in_the_middle_of_its_layers(tmp_path: Path) -> None:
    run = played(tmp_path, Act("baseline", fails_at_layer=40))
    assert run.outcome == "oom"
    assert all(rank.layers_done == 40 for rank in run.ranks)
    assert run.ranks[0].failure is not None
    assert "made-up" in run.ranks[0].failure.reason


@pytest.mark.parametrize("story", STORIES)
def test_every_story_names_records_that_are_shipped(story: str) -> None:
    for act in STORIES[story]:
        assert (RECORDED / act.variant / "run.json").exists()


def test_host_service_stays_quick_with_a_fleet_host(tmp_path: Path) -> None:
    for number in range(6):
        source = tmp_path / f"cast{number}"
        source.mkdir()
        cast(RECORDED / "moe-layer", source, Act("moe-layer"))
        source.rename(_runs(tmp_path) / f"run{number}")
    http = TestClient(create_host_app(RunStore(tmp_path), serve_settings.load({})))
    http.get("/metrics")
    begun = time.perf_counter()
    http.get("/metrics")
    assert time.perf_counter() - begun < 0.5


def _runs(home: Path) -> Path:
    folder = home / "runs"
    folder.mkdir(exist_ok=True)
    return folder
