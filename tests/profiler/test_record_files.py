"""Journal, run folder, header, settings."""

import os
import resource
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest

from loadpeak import run_folder, settings
from loadpeak.journal import Journal
from loadpeak.record import (
    FORMAT,
    Header,
    HookError,
    Memory,
    PhaseStart,
    RankStart,
    decode_header,
    decode_line,
    encode_header,
    encode_line,
)


def header(run: str = "r", instance: str | None = "abc123", created: float = 100.0) -> Header:
    return Header(
        format=FORMAT,
        run=run,
        created_at_wall_seconds=created,
        hostname="h",
        loadpeak_version="0",
        variant="baseline",
        release="off",
        split_limit="vllm",
        engine_instance=instance,
    )


def test_line_comes_back_as_it_was_written() -> None:
    line = PhaseStart(at_seconds=1.5, phase="kv_cache", memory=Memory(allocated_bytes=3), settings="a:b")
    assert decode_line(encode_line(line)) == line


def test_missing_reading_is_not_written_at_all() -> None:
    assert b"reserved" not in encode_line(PhaseStart(at_seconds=1, phase="ready", memory=Memory()))


def test_what_is_no_utf_8_does_not_stop_a_record() -> None:
    """A model in a folder whose name is no UTF-8, and an error that names it."""
    model = msgspec.structs.replace(header(), model="/models/\udcff")
    assert decode_header(encode_header(model)).model == "/models/?"
    line = HookError(at_seconds=1.5, hook="phase", error="no /models/\udcff", count=2)
    assert decode_line(encode_line(line)) == msgspec.structs.replace(line, error="no /models/?")


def test_unknown_kind_of_line_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_line(b'{"line":"phase/99","at_seconds":1}')


def test_header_is_readable_and_complete() -> None:
    text = encode_header(header())
    assert b'"variant": "baseline"' in text
    assert decode_header(text) == header()


def test_journal_is_one_write_a_line_and_never_shared(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rank-0.jsonl")
    journal.append(RankStart(at_seconds=1, at_wall_seconds=2, rank=0, local_rank=0, pid=1))
    assert (tmp_path / "rank-0.jsonl").read_bytes().count(b"\n") == 1, "there without a close"
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "rank-0.jsonl")
    journal.close()
    journal.append(RankStart(at_seconds=1, at_wall_seconds=2, rank=0, local_rank=0, pid=1))
    assert journal.lost == 1


def test_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    """A disk that fills up in the middle of a line: the torn line is closed before the next one."""
    line = RankStart(at_seconds=1, at_wall_seconds=2, rank=0, local_rank=0, pid=1)
    size = len(encode_line(line))
    journal = Journal(tmp_path / "rank-0.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, hard))
    try:
        for _ in range(3):
            journal.append(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append(line)
    journal.close()
    written = (tmp_path / "rank-0.jsonl").read_bytes().split(b"\n")
    assert journal.lost == 2
    assert decode_line(written[0]) == decode_line(written[2]) == line
    assert 0 < len(written[1]) < size


def _join(
    home: Path, rank: int, instance: str | None, wanted: str | None = None, wall: float = 100.0
) -> Path:
    return run_folder.join(home, rank, lambda run: header(run, instance, wall), wanted, wall)


def test_ranks_of_an_engine_share_a_folder(tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda rank=rank: folders.append(_join(tmp_path, rank, "engine")))
        for rank in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 8
    assert len(set(folders)) == 1


def test_two_engines_have_two_runs(tmp_path: Path) -> None:
    assert _join(tmp_path, 0, "one") != _join(tmp_path, 0, "two")


def test_given_run_id_names_the_first_engine_only(tmp_path: Path) -> None:
    assert _join(tmp_path, 0, "one", "mine").name == "mine"
    assert _join(tmp_path, 1, "one", "mine").name == "mine"
    assert _join(tmp_path, 0, "two", "mine").name != "mine"


def test_same_rank_again_is_another_run(tmp_path: Path) -> None:
    folder = _join(tmp_path, 0, "one")
    Journal(run_folder.journal_path(folder, 0)).close()
    assert _join(tmp_path, 0, "one") != folder


def test_run_ids_sort_by_time() -> None:
    ids = [run_folder.new_run_id(seconds, "z") for seconds in (0.0, 0.999, 1.0, 100000.5)]
    assert ids == sorted(ids)
    assert ids[1] == "19700101T000000.999-z"


def test_store_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        _join(tmp_path / "file", 0, "one")


def test_bad_setting_is_named_with_its_value_and_replaced_by_its_default() -> None:
    found = settings.load({"LOADPEAK_PORT": "99999", "LOADPEAK_VARIANT": "a/b", "LOADPEAK_LAYERS": "moe"})
    assert (found.port, found.variant, found.layers) == (9838, "baseline", "moe")
    messages = [str(problem) for problem in found.problems]
    assert any("LOADPEAK_PORT='99999'" in text and "a port number, or off" in text for text in messages)
    assert len(messages) == 2


@pytest.mark.parametrize("text", ["ä" * 101, "x" * 201, "mine\udcff"])
def test_name_that_no_file_can_have_is_a_problem(text: str) -> None:
    found = settings.load({"LOADPEAK_RUN_ID": text, "LOADPEAK_VARIANT": text})
    assert (found.run_id, found.variant) == (None, "baseline")
    assert [problem.name for problem in found.problems] == ["LOADPEAK_RUN_ID", "LOADPEAK_VARIANT"]
    assert all(str(problem).encode() for problem in found.problems), "fit to be logged"
    assert settings.load({"LOADPEAK_RUN_ID": "ä" * 100}).run_id == "ä" * 100


def test_home_follows_the_xdg_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert settings.load({}).home == Path("/state/loadpeak")
    assert settings.load({"LOADPEAK_HOME": "~/x"}).home == Path("~/x").expanduser()


def test_home_of_nobody_is_a_problem_and_without_any_home_there_is_a_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = settings.load({"LOADPEAK_HOME": "~no-such-user/x"})
    assert [problem.name for problem in found.problems] == ["LOADPEAK_HOME"]
    assert found.home == settings.load({}).home

    def nowhere(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert settings.load({}).home == Path(tempfile.gettempdir(), f"loadpeak-{os.getuid()}")


def test_every_setting_has_a_field_and_a_default_that_can_be_parsed() -> None:
    found = settings.load({})
    assert found.problems == ()
    assert {setting.field for setting in settings.TABLE} | {"problems"} == set(found.__struct_fields__)
