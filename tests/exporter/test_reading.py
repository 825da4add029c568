"""Records are read while they are written, and damage is shown with what could be read."""

import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from loadpeak.errors import AmbiguousRunError, RunNotFoundError
from loadpeak.record import CommandEnd, Exit, HookError, RankEnd, encode_line
from loadpeak_exporter.host import Host
from loadpeak_exporter.records import DamagedRun, RankRecord, RunRecord
from loadpeak_exporter.store import STALE_SECONDS, RunReader, RunStore
from loadpeak_exporter.tail import Tail
from tests.exporter.building import RESIDENT, Startup
from tests.fakes import AbsentAllocator, FakeClock, MiB, phase_of

LINE = encode_line(Exit(at_seconds=1.0))


def host(**known: Any) -> Host:
    return Host(**{"boot_id": None, "pid_namespace": None, "clock": FakeClock(5000.0), **known})


def read(home: Path, run: str = "source", on: Host | None = None) -> RunRecord:
    record = RunReader(home / "runs" / run, on or host()).read()
    assert isinstance(record, RunRecord)
    return record


def rank_of(home: Path, on: Host | None = None) -> RankRecord:
    return read(home, on=on).ranks[0]


# ── one file ──────────────────────────────────────────────────────────────────────────────────────


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_bytes(LINE)
    assert len(list(tail.read())) == 1
    with path.open("ab") as file:
        file.write(LINE + LINE)
    assert len(list(tail.read())) == 2
    assert list(tail.read()) == []


def test_torn_last_line_is_no_damage_and_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(LINE + LINE[:10])
    tail = Tail(path)
    assert len(list(tail.read())) == 1
    assert tail.damage == []
    with path.open("ab") as file:
        file.write(LINE[10:])
    assert len(list(tail.read())) == 1


def test_damaged_line_is_reported_with_its_number_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(LINE + b"{broken\n" + LINE + b'{"line":"phase/99","at_seconds":1}\n' + LINE)
    tail = Tail(path)
    assert len(list(tail.read())) == 3
    assert [(damage.file, damage.line_number) for damage in tail.damage] == [
        ("rank-0.jsonl", 2),
        ("rank-0.jsonl", 4),
    ]
    assert "phase/99" in tail.damage[1].reason


def test_binary_file_is_damage_and_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b"\x00\xff" * (5 << 20))
    tail = Tail(path)
    assert list(tail.read()) == []
    assert "longer than" in tail.damage[0].reason


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["torn", "ended"])
def test_overlong_line_is_reported_once_however_often_it_is_looked_at(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = Tail(path)
    path.write_bytes(LINE + b"x" * (9 << 20))
    assert len(list(tail.read())) == 1
    with path.open("ab") as file:
        file.write(b"x" * (2 << 20) + end)
    assert list(tail.read()) == []
    assert [damage.line_number for damage in tail.damage] == [2]
    if end:
        with path.open("ab") as file:
            file.write(LINE + b"{broken\n")
        assert len(list(tail.read())) == 1
        assert [damage.line_number for damage in tail.damage] == [2, 4]


# ── a rank ────────────────────────────────────────────────────────────────────────────────────────


def test_finished_startup_is_known_completely(tmp_path: Path) -> None:
    Startup(tmp_path).load().ready()
    rank = rank_of(tmp_path)
    assert (rank.outcome, rank.phase) == ("ready", "ready")
    assert (rank.layers_expected, rank.layers_done) == (2, 2)
    assert rank.device_used_peak_bytes == 660 * MiB
    assert rank.headroom_bytes == (32 << 30) - 660 * MiB
    assert rank.reserved_peak_bytes == 160 * MiB
    assert rank.allocated_peak_bytes == rank.ready_allocated_bytes == 100 * MiB
    assert rank.retries == 1
    phases = {phase.phase: phase for phase in rank.phases}
    assert phases["load_weights"].device_used_peak_bytes == 600 * MiB
    assert phases["load_weights"].duration_seconds == pytest.approx(0.2, abs=0.05)
    assert phases["process_weights"].reserved_peak_bytes == 160 * MiB


def test_retries_inside_layers_are_counted_before_the_phase_has_ended(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    startup.session.start_phase("process_weights")
    watch = startup.session.start_conversion()
    startup.allocator.retries += 2
    startup.session.end_conversion(watch, name="x", method="m.M", moe=True, layer=0)
    assert rank_of(tmp_path).retries == 2
    startup.session.end_phase()
    assert rank_of(tmp_path).retries == 2, "the phase's own count holds the same two"


def test_layer_is_the_sum_of_its_conversions(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    startup.session.start_phase("process_weights")
    startup.convert(3, moe=False, done=False, hoard=10 * MiB)
    startup.convert(3, moe=True, done=True, hoard=20 * MiB)
    (layer,) = rank_of(tmp_path).layers
    assert (layer.layer, layer.moe, layer.done) == (3, True, True)
    assert layer.duration_seconds == pytest.approx(0.2, abs=0.02)
    assert (layer.reserved_before_bytes, layer.reserved_bytes) == (0, 30 * MiB)
    assert layer.device_peak_bytes == 530 * MiB
    assert layer.released_bytes is None


def test_layer_that_was_converted_while_weights_loaded_is_not_what_stands_at_the_end(tmp_path: Path) -> None:
    """Online quantization converts while weights load; a later pass over all layers changes nothing."""
    startup = Startup(tmp_path)
    with phase_of(startup.session, "load_weights"):
        startup.convert(0, hoard=10 * MiB)
        startup.convert(1, hoard=10 * MiB)
    with phase_of(startup.session, "process_weights"):
        startup.convert(0, moe=False, hoard=0)  # the attention's scales, which were not asked before
        startup.convert(0, hoard=0)
        startup.convert(1, hoard=0)
    (loading, converting), layers = rank_of(tmp_path).phases, rank_of(tmp_path).layers
    assert [layer.reserved_bytes for layer in layers] == [10 * MiB, 20 * MiB]
    assert [layer.reserved_peak_bytes for layer in layers] == [10 * MiB, 20 * MiB]
    assert [layer.device_peak_bytes for layer in layers] == [510 * MiB, 520 * MiB]
    assert loading.started_at_seconds < layers[1].ended_at_seconds < converting.started_at_seconds


def test_layer_whose_first_modules_are_converted_while_weights_load_spans_both(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    with phase_of(startup.session, "load_weights"):
        startup.convert(0, moe=False, hoard=10 * MiB)
    with phase_of(startup.session, "process_weights"):
        startup.convert(0, hoard=20 * MiB)
    (layer,) = rank_of(tmp_path).layers
    assert (layer.reserved_before_bytes, layer.reserved_peak_bytes) == (0, 30 * MiB)


def test_device_use_that_was_in_force_when_a_layer_began_counts_to_it(tmp_path: Path) -> None:
    """Samples are written only when something changes: a layer between two of them still has a peak."""
    startup = Startup(tmp_path)
    startup.session.start_phase("process_weights")
    startup.sample(900 * MiB)
    watch = startup.session.start_conversion()
    startup.session.end_conversion(watch, name="x", method="m.M", moe=True, layer=0)
    startup.sample(100 * MiB)
    assert rank_of(tmp_path).layers[0].device_peak_bytes == 900 * MiB


def test_phase_that_comes_again_is_added_up(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    for size in (50, 20):
        with phase_of(startup.session, "create_model"):
            startup.allocator.allocate(size * MiB)
            startup.allocator.free(size * MiB)
            startup.clock.sleep(1)
    (phase,) = rank_of(tmp_path).phases
    assert phase.duration_seconds == pytest.approx(2, abs=0.1)
    assert phase.allocated_peak_bytes == 50 * MiB


def test_without_readings_everything_is_missing_and_nothing_is_zero(tmp_path: Path) -> None:
    startup = Startup(tmp_path, device=RESIDENT, allocator=AbsentAllocator())
    startup.load().ready()
    rank = rank_of(tmp_path)
    assert (rank.reserved_peak_bytes, rank.retries, rank.ready_allocated_bytes) == (None, None, None)
    assert rank.headroom_bytes is None, "resident memory has no total"
    assert rank.device_used_peak_bytes == 660 * MiB


def test_out_of_memory_names_error_phase_and_keeps_the_message(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    startup.session.start_phase("process_weights")
    startup.session.failed(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
    run = read(tmp_path)
    failure = run.ranks[0].failure
    assert failure is not None
    assert (run.outcome, failure.outcome, failure.phase) == ("oom", "oom", "process_weights")
    assert failure.reason == "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert failure.message is not None
    assert failure.message.endswith("more")


@pytest.mark.parametrize(
    ("line", "outcome", "reason"),
    [
        (RankEnd(at_seconds=6000.0, signal=9), "killed", "signal 9"),
        (RankEnd(at_seconds=6000.0, exit_code=3), "killed", "exit code 3"),
        (Exit(at_seconds=6000.0), "failed", "ended before the engine was ready"),
    ],
)
def test_rank_that_ends_before_ready_says_how(tmp_path: Path, line: Any, outcome: str, reason: str) -> None:
    startup = Startup(tmp_path)
    startup.journal.append(line)
    run = read(tmp_path)
    assert run.outcome == outcome
    assert run.ranks[0].failure is not None
    assert reason in run.ranks[0].failure.reason


def test_end_after_ready_changes_nothing(tmp_path: Path) -> None:
    Startup(tmp_path).load().ready().journal.append(RankEnd(at_seconds=6000.0, signal=15))
    run = read(tmp_path)
    assert (run.outcome, run.ranks[0].failure) == ("ready", None)


def test_sampler_that_fell_silent_shows_as_a_gap(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load()
    assert rank_of(tmp_path).sampler_gap_seconds == 0.01
    startup.clock.sleep(30)
    startup.session.start_phase("profile")
    assert rank_of(tmp_path).sampler_gap_seconds == pytest.approx(30, abs=0.5)


def test_hook_errors_are_the_highest_count(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    for count in (1, 2):
        startup.journal.append(HookError(at_seconds=1.0, hook="phase", error="x", count=count))
    assert rank_of(tmp_path).hook_errors == 2


# ── is it still alive? ────────────────────────────────────────────────────────────────────────────


def proc(folder: Path, pid: int, state: str = "S", started_at_seconds: float = 100.0) -> Path:
    """A ``/proc`` with one process."""
    (folder / str(pid)).mkdir(parents=True)
    ticks = int(started_at_seconds * os.sysconf("SC_CLK_TCK"))
    fields = [state, *["0"] * 18, str(ticks), *["0"] * 30]
    (folder / str(pid) / "stat").write_text(f"{pid} (vllm (x) y) {' '.join(fields)}\n")
    return folder


HERE: dict[str, Any] = {"boot_id": "b", "pid_namespace": 7}


def test_rank_whose_process_runs_is_loading(tmp_path: Path) -> None:
    Startup(tmp_path, pid=42, **HERE)
    assert read(tmp_path, on=host(**HERE, proc=proc(tmp_path / "proc", 42))).outcome == "loading"


@pytest.mark.parametrize(
    "found",
    [{"pid": 43}, {"pid": 42, "state": "Z"}, {"pid": 42, "started_at_seconds": 9000.0}],
    ids=["gone", "zombie", "another process with the same number"],
)
def test_rank_whose_process_is_gone_was_killed(tmp_path: Path, found: dict[str, Any]) -> None:
    Startup(tmp_path, pid=42, **HERE)
    assert read(tmp_path, on=host(**HERE, proc=proc(tmp_path / "proc", **found))).outcome == "killed"


@pytest.mark.parametrize(
    "other", [{"boot_id": "b", "pid_namespace": 8}, {"boot_id": "c", "pid_namespace": 7}]
)
def test_where_process_ids_mean_nothing_a_long_silence_counts_as_death(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    Startup(tmp_path, pid=42, **HERE)
    now = (tmp_path / "runs" / "source" / "rank-0.jsonl").stat().st_mtime
    late = STALE_SECONDS + 1
    assert read(tmp_path, on=host(**other, wall=lambda: now + 1)).outcome == "loading"
    assert read(tmp_path, on=host(**other, wall=lambda: now + late)).outcome == "killed"


# ── the store ─────────────────────────────────────────────────────────────────────────────────────


def test_outcome_of_a_run_is_the_worst_of_its_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        Startup(tmp_path, rank=rank).load().ready()
    assert read(tmp_path).outcome == "ready"
    assert len(read(tmp_path).ranks) == 3
    Startup(tmp_path, rank=3)
    assert read(tmp_path, on=host(wall=lambda: 0.0)).outcome == "loading"
    Startup(tmp_path, rank=4).session.failed(RuntimeError("out of memory"))
    assert read(tmp_path).outcome == "oom"


def test_record_is_the_same_object_until_something_changes(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load()
    reader = RunReader(startup.folder, host(wall=lambda: 0.0))
    first = reader.read()
    assert reader.read() is first
    startup.ready()
    second = reader.read()
    assert second is not first
    assert reader.read() is second


def test_command_that_loadpeak_ran_tells_its_exit_code(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load().ready()
    (startup.folder / "command.jsonl").write_bytes(
        encode_line(CommandEnd(at_seconds=1, at_wall_seconds=1, exit_code=7))
    )
    assert read(tmp_path).exit_code == 7


def test_run_with_a_damaged_line_shows_what_could_be_read(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load()
    with (startup.folder / "rank-0.jsonl").open("ab") as file:
        file.write(b"\x00\x01\n")
    startup.ready()
    run = read(tmp_path)
    assert run.outcome == "ready"
    assert run.damage[0].file == "rank-0.jsonl"
    assert run.damage[0].line_number > 5


def test_runs_are_found_by_id_beginning_latest_and_variant(tmp_path: Path) -> None:
    for run, variant, created in (("aaa-1", "baseline", 1.0), ("aaa-2", "fix", 2.0), ("bbb", "fix", 0.5)):
        Startup(tmp_path, run, variant=variant, created_at_wall_seconds=created).load(1).ready()
    store = RunStore(tmp_path)
    assert [run.run for run in store.runs()] == ["aaa-2", "aaa-1", "bbb"]
    assert store.find("bbb").run == "bbb"
    assert store.find("aaa-1").run == "aaa-1"
    assert store.find("latest").run == "aaa-2"
    assert store.find("latest:baseline").run == "aaa-1"
    with pytest.raises(AmbiguousRunError, match="2 runs begin with 'aaa'"):
        store.find("aaa")
    with pytest.raises(RunNotFoundError, match="no run 'zzz'"):
        store.find("zzz")
    with pytest.raises(RunNotFoundError, match="of variant 'none'"):
        store.find("latest:none")


def test_empty_store_has_no_runs(tmp_path: Path) -> None:
    assert RunStore(tmp_path).runs() == []
    with pytest.raises(RunNotFoundError):
        RunStore(tmp_path).find("latest")


def test_run_that_grows_is_followed(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    store = RunStore(tmp_path, host(wall=lambda: 0.0))
    layers = []
    startup.session.start_phase("process_weights")
    for layer in range(3):
        startup.convert(layer)
        (run,) = store.runs()
        assert isinstance(run, RunRecord)
        layers.append(run.ranks[0].layers_done)
    assert layers == [1, 2, 3]


def test_reader_that_threads_share_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """The demo's live view and its server read the same store; handlers of the host service do too."""
    startup = Startup(tmp_path)
    startup.session.start_phase("process_weights")
    reader = RunReader(startup.folder, host(wall=lambda: 0.0))
    done = threading.Event()

    def follow() -> None:
        while not done.is_set():
            reader.read()

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for layer in range(300):
        watch = startup.session.start_conversion()
        startup.session.end_conversion(watch, name="x", method="m.M", moe=True, layer=layer, layer_done=True)
    done.set()
    for thread in threads:
        thread.join()
    record = reader.read()
    assert isinstance(record, RunRecord)
    assert record.damage == ()
    assert record.ranks[0].layers_done == 300


def test_copied_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    Startup(tmp_path, "one").load().ready()
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "two")
    store = RunStore(tmp_path)
    assert {run.run for run in store.runs()} == {"one", "two"}
    assert store.find("two").run == "two"
    assert {run.run for run in store.exported(math.inf, 10)} == {"one", "two"}


def test_copied_journal_is_a_rank_of_its_own(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load().ready()
    shutil.copy(startup.journal.path, startup.folder / "rank-3.jsonl")
    run = RunStore(tmp_path).reader("source").read()
    assert isinstance(run, RunRecord)
    assert [rank.rank for rank in run.ranks] == [0, 3]


def test_run_that_is_deleted_and_made_again_is_read_anew(tmp_path: Path) -> None:
    Startup(tmp_path, "again").load(4).ready().close()
    store = RunStore(tmp_path)
    assert store.find("again").outcome == "ready"
    assert [run.outcome for run in store.runs() if isinstance(run, RunRecord)] == ["ready"]
    shutil.rmtree(tmp_path / "runs" / "again")
    startup = Startup(tmp_path, "again")
    startup.session.failed(RuntimeError("broken"))
    assert store.find("again").outcome == "failed"
    (run,) = store.exported(math.inf, 10)
    assert run.outcome == "failed"


def test_journal_that_is_cut_is_read_anew(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load(4).ready()
    store = RunStore(tmp_path, host(wall=lambda: 0.0))
    assert store.find("source").ranks[0].layers_done == 4
    path = startup.folder / "rank-0.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    assert store.find("source").ranks[0].layers_done < 4


def test_record_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    Startup(tmp_path, format=99).load().ready()
    run = RunReader(tmp_path / "runs" / "source", host()).read()
    assert isinstance(run, DamagedRun)
    assert "of format 99, this loadpeak knows 1" in run.damage[0].reason
