"""Commands whose output cannot be written: one line, or none where nobody reads any more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.exporter.building import Startup
from tests.exporter.test_run_command import LOADPEAK, environ

FULL = Path("/dev/full")
COMMANDS = (
    ["runs"],
    ["runs", "--json"],
    ["compare", "one", "one"],
    ["report", "one"],
    ["--version"],
    ["runs", "--help"],
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Startup(tmp_path, "one").load().ready()
    return tmp_path


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_output_that_finds_no_room_is_one_line(home: Path, arguments: list[str], unbuffered: str) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [*LOADPEAK, *arguments],
            env={**environ(home), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "loadpeak: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_closed_pipe_is_silent(home: Path, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [*LOADPEAK, *arguments],
        env={**environ(home), "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(20) == 1


def test_recorded_command_goes_on_where_nothing_can_be_shown(home: Path) -> None:
    body = "import time; time.sleep(0.5); print('served'); raise SystemExit(7)"
    with FULL.open("w") as full:
        done = subprocess.run(
            [*LOADPEAK, "run", "--", sys.executable, "-c", body],
            env={**environ(home), "PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert (done.stdout, done.returncode) == ("served\n", 7)


def test_path_that_is_no_utf_8_is_shown_as_it_can_be(tmp_path: Path) -> None:
    home = tmp_path / "\udcff"
    done = subprocess.run(
        [*LOADPEAK, "runs"],
        env={**environ(home), "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"no runs in {tmp_path}/\\udcff/runs yet")
