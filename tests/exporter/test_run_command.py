"""``loadpeak run`` around real commands, with and without a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loadpeak.record import CommandEnd, decode_line

CHILD = Path(__file__).parent / "child_script.py"
LOADPEAK = [sys.executable, "-c", "from loadpeak.cli import main; main()"]
ENVIRONMENT = "import os; print({k: v for k, v in os.environ.items() if k.startswith('LOADPEAK_')})"


def environ(home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOADPEAK_")}
    return {**clean, "LOADPEAK_HOME": str(home), "COLUMNS": "100"}


def loadpeak(
    home: Path, *arguments: str, extra: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LOADPEAK, *arguments],
        env={**environ(home), **(extra or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def recording(body: str) -> list[str]:
    return ["--", sys.executable, str(CHILD), body]


def only_run(home: Path) -> Path:
    (folder,) = (path for path in (home / "runs").iterdir() if path.is_dir())
    return folder


def test_output_and_exit_code_are_the_commands_own(tmp_path: Path) -> None:
    done = loadpeak(tmp_path, "run", *recording("startup.load().ready(); print('serving'); sys.exit(7)"))
    assert done.returncode == 7
    assert done.stdout == "serving\n"
    assert "ready" in done.stderr
    assert "630" in done.stderr or "660" in done.stderr, "the device peak is in the summary"


def test_plain_lines_tell_phases_where_there_is_no_terminal(tmp_path: Path) -> None:
    body = (
        "startup.session.start_phase('load_weights'); startup.sample(); time.sleep(1); startup.load().ready()"
    )
    done = loadpeak(tmp_path, "run", *recording(body))
    assert "loadpeak: load_weights · device used 500 · load peak 500 MiB" in done.stderr
    assert "\x1b" not in done.stderr


def test_command_gets_its_settings_through_the_environment(tmp_path: Path) -> None:
    arguments = ["--release", "threshold:2GiB", "--split-limit", "keep", "--experiment", "e"]
    done = loadpeak(tmp_path, "run", *arguments, "--", sys.executable, "-c", ENVIRONMENT)
    given = eval(done.stdout)
    assert given["LOADPEAK_CACHE_RELEASE"] == "threshold:2GiB"
    assert given["LOADPEAK_SPLIT_LIMIT"] == "keep"
    assert given["LOADPEAK_VARIANT"] == "threshold-2GiB+split-keep"
    assert given["LOADPEAK_EXPERIMENT"] == "e"
    assert re.fullmatch(r"\d{8}T\d{6}\.\d{3}-[0-9a-f]+", given["LOADPEAK_RUN_ID"])


def test_run_keeps_the_name_that_the_environment_gives_it_once(tmp_path: Path) -> None:
    named = {"LOADPEAK_RUN_ID": "mine"}
    done = loadpeak(tmp_path, "run", *recording("startup.load().ready(); sys.exit(5)"), extra=named)
    assert done.returncode == 5
    assert "run mine" in done.stderr
    done = loadpeak(tmp_path, "run", "--", "true", extra=named)
    assert done.returncode == 2
    assert done.stderr == (
        "loadpeak: LOADPEAK_RUN_ID='mine' cannot be used: "
        f"expected a name that no run in {tmp_path}/runs has yet\n"
    )


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("LOADPEAK_RUN_ID", "ä" * 200, "'äää"),
        ("LOADPEAK_VARIANT", "mine\udcff", r"'mine\udcff'"),
        ("LOADPEAK_EXPERIMENT", "x" * 201, "'xxx"),
    ],
)
def test_name_that_no_file_can_have_is_one_clear_line(
    tmp_path: Path, name: str, value: str, shown: str
) -> None:
    done = loadpeak(tmp_path, "run", "--", "true", extra={name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"loadpeak: {name}={shown}")
    assert done.stderr.endswith("expected a name of at most 200 bytes in UTF-8, without slashes\n")
    assert done.stderr.count("\n") == 1


def test_variant_can_be_named(tmp_path: Path) -> None:
    done = loadpeak(
        tmp_path, "run", "--variant", "mine", "--release", "layer", "--", sys.executable, "-c", ENVIRONMENT
    )
    assert eval(done.stdout)["LOADPEAK_VARIANT"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--release", "banana"], "off, moe-layer, layer, threshold:SIZE"),
        (["--split-limit", "kepe"], "vllm (what vLLM does) or keep"),
        (["--variant", "a/b"], "LOADPEAK_VARIANT='a/b'"),
    ],
)
def test_option_that_cannot_be_used_is_one_clear_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = loadpeak(tmp_path, "run", *arguments, "--", "true")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_command_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    done = loadpeak(tmp_path, "run", "--", "no-such-program")
    assert done.returncode == 2
    assert (
        done.stderr
        == "loadpeak: cannot run 'no-such-program': No such file or directory; is it on the PATH?\n"
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [(0, "install loadpeak into the Python environment"), (3, "ended with exit code 3 before a vLLM worker")],
)
def test_command_without_vllm_is_told_what_to_do(tmp_path: Path, code: int, reason: str) -> None:
    done = loadpeak(tmp_path, "run", "--", sys.executable, "-c", f"raise SystemExit({code})")
    assert done.returncode == code
    assert "nothing was recorded" in done.stderr
    assert reason in done.stderr


def test_record_that_cannot_be_read_is_named_as_the_reason(tmp_path: Path) -> None:
    done = loadpeak(tmp_path, "run", *recording("startup.journal.path.write_bytes(b'{broken')"))
    name = only_run(tmp_path).name
    assert done.stderr == f"loadpeak: the record {name} cannot be read; `loadpeak runs` says why\n"


def test_disabled_recording_is_named_as_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LOADPEAK, "run", "--", "true"],
        env={**environ(tmp_path), "LOADPEAK_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "LOADPEAK_DISABLE is set" in done.stderr


def test_end_of_the_command_is_recorded(tmp_path: Path) -> None:
    loadpeak(tmp_path, "run", *recording("startup.load().ready(); sys.exit(5)"))
    line = decode_line((only_run(tmp_path) / "command.jsonl").read_bytes())
    assert isinstance(line, CommandEnd)
    assert line.exit_code == 5


def test_command_that_was_killed_gives_128_and_the_signal(tmp_path: Path) -> None:
    done = loadpeak(tmp_path, "run", *recording("startup.load(); os.kill(os.getpid(), 9)"))
    assert done.returncode == 128 + 9
    listed = json.loads(loadpeak(tmp_path, "runs", "--json").stdout)
    assert listed[0]["outcome"] == "killed"


def test_out_of_memory_is_in_the_summary(tmp_path: Path) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    body = f"startup.load(); startup.session.failed(RuntimeError({message!r}))"
    done = loadpeak(tmp_path, "run", *recording(body))
    assert (
        "oom in process_weights: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB." in done.stderr
    )


def test_standard_input_is_the_commands(tmp_path: Path) -> None:
    done = loadpeak(tmp_path, "run", *recording("startup.load().ready(); print(input())"), input="hello\n")
    assert done.stdout == "hello\n"


# ── on a terminal ─────────────────────────────────────────────────────────────────────────────────


class Terminal:
    """loadpeak on a pseudo-terminal of 100 columns."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.output = b""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execve(LOADPEAK[0], [*LOADPEAK, *arguments], {**environ(home), "TERM": "xterm-256color"})

    def read_until(self, text: bytes, seconds: float = 20) -> bytes:
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, self.output.decode(errors="replace")
            if select.select([self.descriptor], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.descriptor, 65536)
                except OSError:
                    break
        return self.output

    def close(self) -> None:
        os.close(self.descriptor)


def test_terminal_shows_layers_headroom_and_the_output_in_colour(tmp_path: Path) -> None:
    body = """
assert sys.stdout.isatty(), "the command writes to a terminal as well"
print("\\x1b[32mgreen\\x1b[0m line", flush=True)
startup.session.start_phase("process_weights"); startup.session.model(range(48), range(48), 48)
startup.convert(0); startup.convert(1)
time.sleep(1.5)
startup.session.end_phase(); startup.ready()
time.sleep(0.5)
print("serving now", flush=True)
time.sleep(0.5)
sys.exit(4)
"""
    terminal = Terminal(tmp_path, "run", *recording(body))
    shown = terminal.read_until(b"serving now").decode()
    assert "layer 2 of 48" in shown
    assert "headroom 32,208" in shown
    assert "\x1b[32mgreen" in shown, "the colour survives"
    assert re.search(r"run .*ready", shown)
    _, status = os.waitpid(terminal.pid, 0)
    terminal.close()
    assert os.waitstatus_to_exitcode(status) == 4


def test_interrupt_goes_to_the_command_and_loadpeak_waits_for_it(tmp_path: Path) -> None:
    body = """
import signal
def stop(number, frame):
    print("shutting down", flush=True)
    sys.exit(9)
signal.signal(signal.SIGINT, stop)
startup.load().ready()
print("up", flush=True)
time.sleep(30)
"""
    terminal = Terminal(tmp_path, "run", *recording(body))
    terminal.read_until(b"up")
    os.write(terminal.descriptor, b"\x03")
    terminal.read_until(b"shutting down")
    _, status = os.waitpid(terminal.pid, 0)
    terminal.close()
    assert os.waitstatus_to_exitcode(status) == 9


def test_termination_is_passed_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *LOADPEAK,
            "run",
            *recording("startup.load().ready(); print('up', flush=True); time.sleep(30)"),
        ],
        env=environ(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    process.stdout.close()
