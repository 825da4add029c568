"""An experiment's folder as readers find it, whole or damaged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadpeak.errors import CommandError
from loadpeak.record import WeightHashes, WeightsHashed
from loadpeak_exporter.ab import store
from loadpeak_exporter.ab.records import FORMAT, Startup
from loadpeak_exporter.store import RunStore
from tests.exporter import building
from tests.exporter.ab.test_plan import experiment


def begun(home: Path) -> Path:
    folder = store.experiment_folder(home, "e")
    store.write_plan(folder, experiment())
    return folder


def startup(run: str | None = None, pair: int = 0) -> Startup:
    return Startup(pair=pair, arm="baseline", began_at_wall_seconds=1.0, run=run)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    for pair in range(2):
        store.append_startup(folder, startup(pair=pair))
    found, evidence = store.read_experiment(tmp_path, "e")
    assert found == experiment()
    assert [each.startup for each in evidence] == [startup(pair=0), startup(pair=1)]
    assert evidence[0].run is None


def hashed(home: Path, hashes: int, said: int | None) -> dict[int, dict[str, str]] | None:
    """The weights that are read when so many hashes stand in the journal, and the end line says so many."""
    recorded = building.Startup(home, "r").load().ready()
    now = time.monotonic()
    for number in range(hashes):
        recorded.journal.append(WeightHashes(at_seconds=now, module="", hashes={f"w{number}": "abc"}))
    if said is not None:
        recorded.journal.append(
            WeightsHashed(at_seconds=now, tensors=said, size_bytes=1, duration_seconds=1.0)
        )
    store.append_startup(begun(home), startup("r"))
    _, (evidence,) = store.read_experiment(home, "e")
    assert evidence.run is not None
    assert evidence.run.outcome == "ready"
    return evidence.weights


def test_whole_set_of_hashes_is_read(tmp_path: Path) -> None:
    assert hashed(tmp_path, 2, 2) == {0: {"w0": "abc", "w1": "abc"}}


@pytest.mark.parametrize(("hashes", "said"), [(2, None), (2, 3), (0, None)])
def test_torn_set_of_hashes_is_none(tmp_path: Path, hashes: int, said: int | None) -> None:
    """An engine that is killed while it hashes must not look like one with fewer weights."""
    assert hashed(tmp_path, hashes, said) is None


def test_hashes_change_nothing_else_in_the_run(tmp_path: Path) -> None:
    plain = building.Startup(tmp_path, "plain").load().ready()
    with_hashes = building.Startup(tmp_path, "hashed").load().ready()
    with_hashes.journal.append(WeightHashes(at_seconds=5000.5, module="", hashes={"w": "abc"}))
    runs = RunStore(tmp_path)
    one, other = (runs.find(name) for name in (plain.folder.name, with_hashes.folder.name))
    assert other.damage == ()
    assert one.ranks == other.ranks


FAULTS: tuple[dict[str, Any], ...] = (
    {"arms": []},
    {"arms": [{"name": "baseline"}]},
    {"pairs": 0},
    {"command": []},
    {"created_at_wall_seconds": 1e300},
)


def plan_with(**fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(experiment()), **fields})


def startup_with(run: str) -> bytes:
    return msgspec.json.encode(startup(run)) + b"\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (store.PLAN, b"{", "experiment.json cannot be read"),
        (store.PLAN, b'{"format":1}', "experiment.json cannot be read"),
        (store.STARTUPS, b'{"pair":0}\n', "startups.jsonl line 1 is no startup"),
        (store.STARTUPS, b"\xff\n", "startups.jsonl line 1 is no startup"),
        *((store.PLAN, plan_with(**fault), "cannot be read: Expected") for fault in FAULTS),
        *((store.STARTUPS, startup_with(run), "line 1 is no startup") for run in ("../e", "a\0b", "..", "")),
    ],
)
def test_damaged_file_is_one_clear_error(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (begun(tmp_path) / file).write_bytes(content)
    with pytest.raises(CommandError, match=message):
        store.read_experiment(tmp_path, "e")


def test_plan_of_a_later_format_is_refused(tmp_path: Path) -> None:
    """Whatever its other fields are then."""
    folder = begun(tmp_path)
    (folder / store.PLAN).write_bytes(plan_with(format=FORMAT + 1, pairs="many"))
    with pytest.raises(CommandError, match=f"has format {FORMAT + 1}, this loadpeak reads {FORMAT}"):
        store.read_plan(folder)


def test_unknown_experiment_is_told_with_those_there_are(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(CommandError, match=r"no experiment 'x' in .*; there are e"):
        store.read_experiment(tmp_path, "x")


@pytest.mark.parametrize("name", ["", ".", "../e", "a/b", ".hidden", "a\nb", "x" * 300, "é" * 150, "\udcff"])
def test_name_with_path_parts_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CommandError, match="cannot name an experiment"):
        store.read_experiment(tmp_path, name)
