"""Records that cannot be read, at all or to their end, and those that are too large: said, and no figures."""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadpeak.errors import RunNotFoundError
from loadpeak.record import CommandEnd, encode_line
from loadpeak_exporter import store
from loadpeak_exporter.records import DamagedRun, RunRecord
from loadpeak_exporter.store import STALE_SECONDS, RunReader, RunStore
from tests.exporter.building import Startup
from tests.exporter.test_reading import HERE, LINE, host, rank_of, read


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of an administrator, whom no permissions stop."""
    administrator = os.geteuid() == 0
    if administrator:
        os.seteuid(65534)
    try:
        yield
    finally:
        if administrator:
            os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that others may look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("rank-0.jsonl", ("rank-0.jsonl", "cannot be read: Permission denied")),
        ("", ("the folder", "cannot be listed: Permission denied")),
        ("run.json", ("run.json", "cannot be read: Permission denied")),
    ],
)
def test_run_that_may_not_be_read_is_damaged_until_it_may(
    shared: Path, place: str, problem: tuple[str, str]
) -> None:
    folder = Startup(shared).load().ready().folder
    runs = RunStore(shared, host(wall=lambda: 10.0))
    mode = (folder / place).stat().st_mode
    (folder / place).chmod(0o311)
    with nobody():
        (run,) = runs.runs()
        assert isinstance(run, DamagedRun), "neither loading, nor figures"
        assert [(damage.file, damage.reason) for damage in run.damage] == [problem]
        with pytest.raises(RunNotFoundError, match=" ".join(problem)):
            runs.find("source")
        assert runs.exported(math.inf, 10) == []
    (folder / place).chmod(mode)
    with nobody():
        found = runs.find("source")
    assert (found.outcome, found.damage) == ("ready", ())


def test_journal_that_may_not_be_read_hides_no_other_rank(shared: Path) -> None:
    Startup(shared).load().journal.path.chmod(0)
    Startup(shared, rank=1).load().ready()
    with nobody():
        run = read(shared)
    assert [rank.rank for rank in run.ranks] == [1]
    assert [damage.file for damage in run.damage] == ["rank-0.jsonl"]


@pytest.mark.parametrize("journal", [None, b""], ids=["no journal", "empty journal"])
def test_run_whose_ranks_wrote_nothing_is_damaged_in_the_end(tmp_path: Path, journal: bytes | None) -> None:
    """The first rank died, or found the disk full, just after it had made the folder."""
    folder = Startup(tmp_path, created_at_wall_seconds=100.0).folder
    (folder / "rank-0.jsonl").unlink()
    if journal is not None:
        (folder / "rank-0.jsonl").write_bytes(journal)
    now = 101.0
    reader = RunReader(folder, host(wall=lambda: now))
    young = reader.read()
    assert isinstance(young, RunRecord)
    assert (young.outcome, young.ranks) == ("loading", ())
    now += STALE_SECONDS
    old = reader.read()
    assert isinstance(old, DamagedRun)
    assert "holds no line of any rank" in old.damage[0].reason


def test_number_of_ranks_that_are_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_RANKS", 3)
    reader = RunReader(Startup(tmp_path, rank=11).load().ready().folder, host())
    assert isinstance(reader.read(), RunRecord)
    for rank in (10, 2, 1):
        Startup(tmp_path, rank=rank).load().ready()
    for _ in range(2):
        run = reader.read()
        assert isinstance(run, RunRecord)
        assert [rank.rank for rank in run.ranks] == [1, 2, 11]
        assert [damage.reason for damage in run.damage] == [
            "holds more ranks than any engine has; 3 of them are read"
        ]


def test_damaged_folders_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    Startup(tmp_path).load().ready()
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "binary").mkdir()
    (tmp_path / "runs" / "binary" / "run.json").write_bytes(b"\x00\xff\xfe")
    (tmp_path / "runs" / "a file").touch()
    found = {run.run: run for run in RunStore(tmp_path).runs()}
    assert set(found) == {"source", "empty", "binary"}
    empty, binary = found["empty"], found["binary"]
    assert isinstance(empty, DamagedRun)
    assert isinstance(binary, DamagedRun)
    assert "is not there" in empty.damage[0].reason
    assert "cannot be read" in binary.damage[0].reason


def test_what_is_no_file_is_damage_and_stops_nobody(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load().ready()
    os.mkfifo(startup.folder / "rank-1.jsonl")
    run = read(tmp_path)
    assert run.outcome == "ready"
    assert [(damage.file, damage.reason) for damage in run.damage] == [
        ("rank-1.jsonl", "cannot be read: it is no file")
    ]


def test_folder_whose_name_is_no_utf_8_hides_no_other_run(tmp_path: Path) -> None:
    Startup(tmp_path, "one").load().ready()
    (tmp_path / "runs" / "two\udcff").mkdir()
    assert [run.run for run in RunStore(tmp_path).runs()] == ["one"]


def test_link_in_a_circle_hides_no_other_run(tmp_path: Path) -> None:
    Startup(tmp_path, "one").load().ready()
    (tmp_path / "runs" / "loop").symlink_to("loop")
    assert [run.run for run in RunStore(tmp_path).runs()] == ["one"]


def test_sample_of_a_ready_engine_stands_for_a_line_that_found_the_disk_full(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load()
    startup.session.phase = "ready"
    startup.sample()
    rank = rank_of(tmp_path)
    assert (rank.outcome, rank.phase, rank.failure) == ("ready", "ready", None)
    assert (rank.ready_allocated_bytes, rank.ready_at_seconds) == (None, None), "these are lost"


@pytest.mark.parametrize(
    ("file", "added", "hint"),
    [
        ("rank-0.jsonl", LINE[:10], "rank-0.jsonl is not whole, as on a full disk"),
        ("device-0.jsonl", b"{broken\n", "device-0.jsonl is not whole, as on a full disk"),
        (
            "command.jsonl",
            encode_line(CommandEnd(at_seconds=1, at_wall_seconds=1, exit_code=0)),
            "the command ended with exit code 0",
        ),
        ("command.jsonl", encode_line(CommandEnd(at_seconds=1, at_wall_seconds=1, exit_code=137)), None),
    ],
)
def test_record_that_ends_early_does_not_claim_to_know_the_end(
    tmp_path: Path, file: str, added: bytes, hint: str | None
) -> None:
    startup = Startup(tmp_path, pid=42, **HERE).load()
    with (startup.folder / file).open("ab") as record:
        record.write(added)
    failure = read(tmp_path, on=host(**HERE, proc=tmp_path)).ranks[0].failure
    assert failure is not None
    unknown = "the process is gone, and whether the engine was ready before is not known: "
    expected = unknown + hint if hint else "the process was gone before the engine was ready"
    assert failure.reason == expected
