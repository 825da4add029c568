"""``loadpeak whatif`` as a person and as a program call it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer.testing

from loadpeak import cli
from loadpeak.errors import CommandError, LoadpeakError, SettingError
from tests.whatif.making import Startup


def call(*arguments: str, text: str = "", width: int = 80) -> str:
    runner = typer.testing.CliRunner()
    result = runner.invoke(
        cli.build(["whatif"]), ["whatif", *arguments], input=text, env={"COLUMNS": str(width)}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return Startup(layers=8).write(tmp_path)


def test_json_is_what_programs_were_told(history: Path) -> None:
    found = json.loads(call(str(history), "--json", "--release", "off", "--release", "moe-layer"))
    assert found.keys() == {"settings", "recommendation"}
    for row in found["settings"]:
        assert list(row) == [
            "alloc_conf",
            "release",
            "capacity_bytes",
            "peak_reserved_bytes",
            "peak_allocated_bytes",
            "end_reserved_bytes",
            "retries",
            "fits",
        ]
    assert [row["release"] for row in found["settings"]] == ["moe-layer", "off"], "ranked"
    assert found["settings"][0]["fits"] is None, "not known without a capacity"


def test_json_tells_the_split_limit_where_both_are_tried(history: Path) -> None:
    found = json.loads(call(str(history), "--json"))
    assert {row["split_limit"] for row in found["settings"]} == {"vllm", "keep"}


@pytest.mark.parametrize("width", [80, 140])
def test_output_fits_the_terminal(history: Path, width: int) -> None:
    output = call(str(history), "--capacity", "2GiB", "--capacity", "300MiB", width=width)
    assert max(map(len, output.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_rows_are_told_apart_at_any_width(history: Path, width: int) -> None:
    asked = [f"--alloc-conf=expandable_segments:True,max_split_size_mb:{limit}" for limit in (64, 128)]
    output = call(str(history), *asked, "--capacity", "32GiB", "--capacity", "24GiB", width=width)
    lines = output[output.index("setting") :].splitlines()[2:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.strip())]
    assert "…" not in "".join(table)
    words = "".join("".join(line[1:].split("  ")[0].split()) for line in table)
    assert words.count("max_split_size_mb:128") == 2
    assert {"32,768", "24,576"} <= set(" ".join(table).split())


def test_output_has_table_sentence_chart_and_reasons(history: Path) -> None:
    output = call(str(history))
    for part in (
        "peak",
        "retained",
        "calls",
        "Set ",
        "across the layers",
        "●",
        "Why: the peak",
        "free since",
    ):
        assert part in output


def test_folder_of_a_run_is_enough(history: Path) -> None:
    assert call(str(history.parent), "--json") == call(str(history), "--json")


def test_inferred_layers_are_said_to_be(history: Path) -> None:
    assert "inferred" not in call(str(history))
    foreign = history.rename(history.with_name("snapshot.pickle.gz"))
    assert "the layers are inferred" in call(str(foreign))


def test_replay_that_does_not_agree_with_the_recording_is_said_to(history: Path) -> None:
    """The record's own timeline is missing beside a snapshot of somebody else."""
    startup = Startup(layers=8)
    at = startup.recorder.add("segment_map", 900 << 20)
    startup.recorder.alloc(1, address=at)
    path = startup.write(history.parent)
    foreign = path.rename(path.with_name("snapshot.pickle.gz"))
    assert "give them with --timeline" in " ".join(call(str(foreign)).split())


def test_chart_is_written_as_a_page(history: Path, tmp_path: Path) -> None:
    page = tmp_path / "chart.html"
    call(str(history), "--chart", str(page), "--json")
    assert page.read_text().startswith("<!doctype html>")


def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["loadpeak", "whatif", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give a memory history"),
        (["none.pickle"], "cannot be read"),
        (["--oom", "none.txt"], "cannot be read"),
        (["{history}", "--capacity", "much"], "--capacity"),
        (["{history}", "--release", "often"], "release"),
        (["{history}", "--split-limit", "most"], "--split-limit"),
        (["{history}", "--alloc-conf", "nonsense"], "alloc_conf"),
        (
            ["{history}", "--read-limit", "1KiB"],
            "more than 1,024 bytes of memory to read; --read-limit allows",
        ),
        (["{folder}"], "has no memory history; set LOADPEAK_MEMORY_HISTORY"),
    ],
)
def test_wrong_call_is_one_line(
    history: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    found = [part.format(history=history, folder=empty) for part in arguments]
    error = main(monkeypatch, capsys, *found)
    assert error.count("\n") == 1
    assert reason in error


MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.74 GiB of which"


def test_message_is_read_from_a_file_or_from_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "error.txt"
    path.write_text(MESSAGE)
    found = json.loads(call("--oom", str(path), "--json"))
    assert found == json.loads(call("--oom", "-", "--json", text=MESSAGE))
    assert list(found) == [
        "requested_bytes",
        "capacity_bytes",
        "free_bytes",
        "process_in_use_bytes",
        "allocated_bytes",
        "reserved_unallocated_bytes",
        "reserved_bytes",
        "private_pool_bytes",
    ]
    assert found["requested_bytes"] == 2 << 30
    assert found["free_bytes"] is None
    assert "2,147,483,648" in call("--oom", str(path))


def test_startup_that_died_is_explained_as_far_as_it_went(tmp_path: Path) -> None:
    """The recording ends in an out-of-memory error in layer 6 of 8."""
    history = Startup(layers=8, dies_in=6).write(tmp_path)
    died = json.loads(call(str(history), "--json"))
    assert {row["fits"] for row in died["settings"]} == {False}, "the limit is the one that the run met"
    larger = json.loads(call(str(history), "--capacity", "4GiB", "--json"))
    assert {row["fits"] for row in larger["settings"]} == {True}
    output = " ".join(call(str(history)).split())
    assert "out of memory in layer 6, asking for 2,048 MiB" in output
    assert "the recording ends after 7 of 8 layers" in output


def test_nothing_is_recommended_where_the_replay_misses_the_recorded_peak(traces: Path) -> None:
    """Without a timeline the split limit that vLLM sets while it loads is not known."""
    found = json.loads(call(str(traces / "vllm026-awq-expandable.pickle.xz"), "--json", "--release", "off"))
    assert found["recommendation"].startswith("No recommendation: the recorded peak was 32,754 MiB")


def test_run_is_named_by_its_id_or_as_the_latest(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for run in ("1", "2", "3"):
        (home / "runs" / run).mkdir(parents=True)
    for path in history.parent.glob("*.*"):
        (home / "runs" / "2" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("LOADPEAK_HOME", str(home))
    assert call("2", "--json") == call("latest", "--json") == call(str(history), "--json")
    with pytest.raises(CommandError, match="3 has no memory history; set LOADPEAK_MEMORY_HISTORY"):
        call("3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-folder/c.html", "cannot be written"),
        ("folder.html", "cannot be written"),
        ("c.png", "expected a file that ends in .html"),
    ],
)
def test_chart_that_cannot_be_written_costs_no_answer(
    history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    arguments = [str(history), "--json", "--chart", str(tmp_path / name)]
    result = typer.testing.CliRunner().invoke(cli.build(["whatif"]), ["whatif", *arguments])
    assert isinstance(result.exception, LoadpeakError)
    assert message in str(result.exception)
    assert ("settings" in result.output) == name.endswith(".html")


def test_kept_split_limit_is_named_in_every_row(history: Path) -> None:
    found = json.loads(call(str(history), "--json", "--split-limit", "keep"))
    assert {row["split_limit"] for row in found["settings"]} == {"keep"}


@pytest.mark.parametrize("size", ["9" * 400, "1e5", "GiB", "0", "0GiB"])
def test_size_that_is_none_is_refused(history: Path, size: str) -> None:
    with pytest.raises(SettingError, match="a size such as 32GiB"):
        call(str(history), "--capacity", size)


def test_damaged_journal_is_left_out(history: Path) -> None:
    """Without its first line, or with times that no clock shows."""
    journal = history.parent / "rank-0.jsonl"
    first, *rest = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(rest))
    assert "the layers are inferred" in " ".join(call(str(history)).split())
    journal.write_bytes(
        b"".join([first, rest[0].replace(b'"at_seconds":', b'"at_seconds":1e308,"x":'), *rest])
    )
    assert "the layers are inferred" not in " ".join(call(str(history)).split())
    journal.unlink()
    journal.mkdir()
    with pytest.raises(CommandError, match="cannot be read: Is a directory"):
        call(str(history))
