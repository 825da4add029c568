"""The comparison of two runs and its JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadpeak.cli import build
from loadpeak_exporter.compare import compare
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore
from tests.exporter.building import RESIDENT, Startup
from tests.fakes import AbsentAllocator, MiB, phase_of

SIDE = {
    "run",
    "variant",
    "outcome",
    "worst_device_peak_bytes",
    "worst_reserved_peak_bytes",
    "allocated_peak_bytes",
    "ready_allocated_bytes",
    "allocator_retries",
    "alloc_conf",
    "layers",
}


def find(home: Path, run: str) -> RunRecord:
    return RunStore(home).find(run)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADPEAK_HOME", str(tmp_path))
    conf: dict[str, Any] = {"alloc_conf": "expandable_segments:True"}
    for rank in (0, 1):
        Startup(tmp_path, "b", rank, variant="baseline", **conf).load(3 + rank).ready()
        Startup(tmp_path, "f", rank, release="moe-layer", variant="moe-layer", **conf).load(3 + rank).ready()
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(build(list(arguments)), list(arguments))


def test_sides_show_the_worst_rank(home: Path) -> None:
    result = compare(find(home, "b"), find(home, "f"))
    assert result.baseline.worst_device_peak_bytes == 720 * MiB
    assert result.fix.worst_device_peak_bytes == 630 * MiB
    assert result.peak_reduction_bytes == 90 * MiB
    assert result.baseline.layers == 4
    assert result.baseline.allocator_retries == 3 + 6
    assert result.ready_allocated_equal is True
    assert [pair.rank for pair in result.ranks] == [0, 1]


def test_json_has_the_agreed_shape(home: Path) -> None:
    printed = json.loads(invoke("compare", "b", "f", "--json").stdout)
    assert printed.keys() == {"baseline", "fix", "peak_reduction_bytes", "ready_allocated_equal", "ranks"}
    assert printed["baseline"].keys() == printed["fix"].keys() == SIDE
    assert printed["fix"]["alloc_conf"] == "expandable_segments:True"
    assert printed["ranks"][1]["baseline"]["device_peak_bytes"] == 720 * MiB


def test_missing_readings_are_null(home: Path) -> None:
    Startup(home, "cpu", device=RESIDENT, allocator=AbsentAllocator()).load().ready()
    printed = json.loads(invoke("compare", "b", "cpu", "--json").stdout)
    assert printed["fix"]["worst_reserved_peak_bytes"] is None
    assert printed["fix"]["ready_allocated_bytes"] is None
    assert printed["ready_allocated_equal"] is None
    assert printed["ranks"][1]["fix"] is None


def test_one_differing_byte_in_one_rank_is_not_equal(home: Path) -> None:
    startup = Startup(home, "d", 0).load()
    startup.ready()
    other = Startup(home, "d", 1).load()
    other.allocator.allocate(1)
    other.ready()
    assert compare(find(home, "b"), find(home, "d")).ready_allocated_equal is False


def test_run_that_never_had_a_device_reading_has_no_reduction(home: Path) -> None:
    (home / "runs" / "n").mkdir()
    for name in ("run.json", "rank-0.jsonl"):
        (home / "runs" / "n" / name).write_bytes((home / "runs" / "b" / name).read_bytes())
    assert compare(find(home, "b"), find(home, "n")).peak_reduction_bytes is None


def test_table_names_figures_and_difference(home: Path) -> None:
    text = invoke("compare", "latest:baseline", "latest:moe-layer").stdout
    assert "worst load peak" in text
    assert "-90" in text
    assert "90 MiB lower" in text
    assert "equal to the byte on every rank" in text


def test_kv_cache_that_fills_both_devices_hides_neither_load_peak_nor_headroom(tmp_path: Path) -> None:
    for run, release in (("b", "off"), ("f", "moe-layer")):
        startup = Startup(tmp_path, run, release=release).load(3)
        with phase_of(startup.session, "kv_cache"):
            startup.sample(30 << 30)
        startup.ready()
    result = compare(find(tmp_path, "b"), find(tmp_path, "f"))
    assert result.peak_reduction_bytes == 0
    assert result.worst_load_peaks == (690 * MiB, 630 * MiB)
    (rank,) = find(tmp_path, "f").ranks
    assert (rank.headroom_bytes, rank.load_headroom_bytes) == (2 << 30, (32 << 30) - 630 * MiB)


def test_runs_lists_damaged_ones_as_such(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "runs" / "empty").mkdir()
    monkeypatch.setenv("COLUMNS", "120")
    text = invoke("runs").stdout
    assert "damaged" in text
    assert "moe-layer" in text
    printed = json.loads(invoke("runs", "--json").stdout)
    assert {run.get("run") or run["header"]["run"] for run in printed} == {"b", "f", "empty"}


def test_runs_lists_the_newest_and_says_how_many_are_left(home: Path) -> None:
    text = invoke("runs", "--limit", "1").stdout
    assert "and 1 older: loadpeak runs --limit 2" in text
    assert len(json.loads(invoke("runs", "--limit", "1", "--json").stdout)) == 1


def test_empty_store_says_how_to_make_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADPEAK_HOME", str(tmp_path))
    assert "loadpeak run -- vllm serve" in invoke("runs").stdout


def test_out_of_memory_names_the_next_step(home: Path) -> None:
    startup = Startup(home, "o", variant="dies").load(1)
    startup.session.failed(RuntimeError("out of memory"))
    text = " ".join(invoke("compare", "b", "o").stdout.split())
    assert "dies: oom" in text
    assert "loadpeak whatif latest" in text
