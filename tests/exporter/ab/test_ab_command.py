"""``loadpeak ab`` around engines that work and engines that do not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadpeak_exporter.ab.records import Evidence, Experiment
from loadpeak_exporter.ab.store import read_experiment
from tests.conftest import free_port
from tests.exporter.test_run_command import LOADPEAK, Terminal, environ, loadpeak
from tests.profiler.test_sampler import wait_for

ENGINE = Path(__file__).parent / "engine.py"


def server(*faults: str) -> list[str]:
    return ["--", sys.executable, str(ENGINE), "serve", "--port", str(free_port()), *faults]


def ab(home: Path, *arguments: str, name: str = "e") -> subprocess.CompletedProcess[str]:
    return loadpeak(home, "ab", "--experiment", name, *arguments)


def read(home: Path, name: str = "e") -> tuple[Experiment, tuple[Evidence, ...]]:
    return read_experiment(home, name)


def arms(evidence: tuple[Evidence, ...]) -> list[tuple[int, str]]:
    return [(found.startup.pair, found.startup.arm) for found in evidence]


def pid_in(log: Path, word: str) -> int:
    """The process id that an engine printed."""

    def find() -> re.Match[str] | None:
        return re.search(rf"^{word} (\d+)$", log.read_text(), re.MULTILINE) if log.exists() else None

    wait_for(find, 20)
    found = find()
    assert found is not None
    return int(found[1])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def log_of(home: Path, pair: int = 1, arm: str = "baseline") -> Path:
    return home / "experiments" / "e" / f"{pair}-{arm}.log"


def test_arms_alternate_and_everything_is_known_afterwards(tmp_path: Path) -> None:
    done = ab(tmp_path, *server())
    assert done.returncode == 0, done.stderr
    experiment, evidence = read(tmp_path)
    assert arms(evidence) == [(0, "baseline"), (0, "fix"), (1, "fix"), (1, "baseline")]
    for found in evidence:
        startup, run = found.startup, found.run
        assert run is not None
        assert (run.outcome, run.header.variant, run.header.experiment) == ("ready", startup.arm, "e")
        assert run.header.release == ("moe-layer" if startup.arm == "fix" else "off")
        assert (startup.error, startup.exit_code) == (None, 0)
        assert startup.ready_after_seconds is not None
        assert found.weights == {0: {"w": "abc"}}
        assert found.not_hashed == {0: {}}
        assert found.settings == {"dtype": "bf16"}
        assert startup.outputs is not None
        assert len(startup.outputs) == len(experiment.prompts) > 1
        assert startup.outputs[0].token_ids == (len(experiment.prompts[0].text or ""),) * 2
        assert startup.outputs[0].logprobs == (-0.5, -0.25)
    assert "pair 2 of 2 · baseline · startup 4 of 4 · about" in done.stderr
    assert "the gate passed" in done.stdout
    assert not lives(pid_in(log_of(tmp_path), "engine"))


@pytest.mark.parametrize(
    ("setting", "rule", "figures"),
    [
        ("flag=--other", "weights", "w"),
        ("flag=--infinite", "logprobs", "prompt 0 of fix has 1 finite ones for 2 tokens"),
        ("release=threshold:1000GiB", "device-peak", "660 → 660 MiB"),
    ],
)
def test_what_the_gate_must_refuse_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, rule: str, figures: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = ab(tmp_path, "--pairs", "1", "--arm", "fix:release=layer", "--arm", f"fix:{setting}", *server())
    assert done.returncode == 1, done.stderr
    failed = [line.split() for line in done.stdout.splitlines() if "failed" in line]
    assert [line[0] for line in failed] == [rule], done.stdout
    assert figures in " ".join(failed[0])
    assert "the gate did not pass" in done.stdout


def test_failed_arm_is_reported_and_the_others_run(tmp_path: Path) -> None:
    done = ab(tmp_path, "--pairs", "1", "--arm", "broken:flag=--die", "--arm", "fix:release=layer", *server())
    assert done.returncode == 1
    _, evidence = read(tmp_path)
    assert arms(evidence) == [(0, "baseline"), (0, "broken"), (0, "fix")]
    out_of_memory = "oom in process_weights: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert [found.startup.error for found in evidence] == [None, out_of_memory, None]
    assert evidence[1].startup.exit_code == 1
    assert "pair 1 · broken: oom in process_weights" in done.stdout


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("--hang", ("--ready-timeout", "1"), "it was not ready within 1 s; its output is in 1-baseline.log"),
        ("--refuse", (), "prompt 0: status 400: This prompt is too long."),
        ("--unrecorded", (), "install loadpeak into the Python environment"),
        ("--noise", ("--timeout", "1"), "it was ready, but neither answered on port "),
        ("--cut", (), "prompt 0: no answer that can be read (IncompleteRead"),
        ("--words", (), "prompt 0: Expected `int`, got `str` - at `$.choices[0].token_ids[0]`; expected"),
    ],
)
def test_startup_that_comes_to_nothing_has_a_reason(
    tmp_path: Path, fault: str, options: tuple[str, ...], message: str
) -> None:
    done = ab(tmp_path, "--pairs", "1", *options, *server(fault))
    assert done.returncode == 1
    _, evidence = read(tmp_path)
    assert len(evidence) == 2
    assert message in str(evidence[0].startup.error)
    assert not lives(pid_in(log_of(tmp_path), "engine"))


def test_engine_that_does_not_want_to_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from loadpeak.cli import main; from loadpeak_exporter.ab import processes as p; "
        "p.INTERRUPT_SECONDS = p.TERMINATE_SECONDS = p.SAMPLER_SECONDS = 0.3; main()"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "ab",
        "--experiment",
        "e",
        "--pairs",
        "1",
        *server("--stubborn"),
    ]
    done = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, evidence = read(tmp_path)
    assert [found.startup.exit_code for found in evidence] == [128 + signal.SIGKILL] * 2
    for word in ("engine", "child"):
        assert not lives(pid_in(log_of(tmp_path), word)), word


def test_engine_that_becomes_a_daemon_is_found_and_killed(tmp_path: Path) -> None:
    done = ab(tmp_path, "--pairs", "1", *server("--daemon"))
    assert done.returncode == 1, done.stderr
    for arm in ("baseline", "fix"):
        assert not lives(pid_in(log_of(tmp_path, arm=arm), "engine"))


def test_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = ab(tmp_path, "--", sys.executable, str(ENGINE), "serve", "--port", port)
    assert done.returncode == 2
    assert f"something listens on 127.0.0.1:{port} already" in done.stderr
    assert read(tmp_path)[1] == ()


def test_script_ends_by_itself_and_its_outputs_are_kept(tmp_path: Path) -> None:
    done = ab(tmp_path, "--pairs", "1", "--", sys.executable, str(ENGINE), "script")
    assert done.returncode == 0, done.stderr
    experiment, evidence = read(tmp_path)
    assert experiment.prompts == ()
    for found in evidence:
        assert found.startup.outputs is not None
        assert found.startup.outputs[0].token_ids == (5, 6)
        assert found.startup.outputs[0].logprobs == (-1, -2)


def test_script_that_fails_after_ready_is_an_error(tmp_path: Path) -> None:
    done = ab(tmp_path, "--pairs", "1", "--", sys.executable, str(ENGINE), "script", "--fail")
    assert done.returncode == 1
    assert "it ended with exit code 3; its output is in 1-baseline.log" in done.stdout


def test_outputs_that_cannot_be_read_fail_their_startup_and_no_other(tmp_path: Path) -> None:
    done = ab(tmp_path, "--pairs", "1", "--", sys.executable, str(ENGINE), "script", "--torn")
    assert done.returncode == 1, done.stderr
    assert "pair 1 · fix: 1-fix.outputs.jsonl cannot be read: Input data was truncated" in done.stdout


def test_colours_of_an_error_are_left_out(tmp_path: Path) -> None:
    program = "print('\\033[31mValueError:\\033[0m no\\007'); raise SystemExit(4)"
    done = ab(tmp_path, "--pairs", "1", "--", sys.executable, "-c", program)
    assert done.returncode == 1
    assert read(tmp_path)[1][0].startup.error == "it ended with exit code 4: ValueError: no"


def test_command_that_is_no_vllm_is_told_so(tmp_path: Path) -> None:
    done = ab(tmp_path, "--pairs", "1", "--", "true")
    assert done.returncode == 1
    assert "nothing was recorded: 'true' started no vLLM worker that has loadpeak installed" in done.stdout


def test_terminal_shows_pair_arm_and_what_happens(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "ab", "--experiment", "e", "--pairs", "1", *server())
    shown = terminal.read_until(b"experiment e").decode()
    assert "e · pair 1 of 1 · baseline · " in shown
    assert re.search(r"e · pair 1 of 1 · fix · \w* · about \d+ s left", shown)
    assert "layer 2 of 2" in shown
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 0
    terminal.close()


# ── interrupted and continued ─────────────────────────────────────────────────────────────────────


def interrupted(
    home: Path,
    command: list[str],
    *options: str,
    number: signal.Signals = signal.SIGINT,
    again: float | None = None,
) -> str:
    """Interrupt the second startup; what was said."""
    process = subprocess.Popen(
        [*LOADPEAK, "ab", "--experiment", "e", *options, *command],
        env=environ(home),
        stderr=subprocess.PIPE,
        text=True,
    )
    engine = pid_in(log_of(home, arm="fix"), "engine")
    process.send_signal(number)
    if again is not None:
        time.sleep(again)
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert not lives(engine)
    return said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_experiment_is_continued_where_it_stopped(tmp_path: Path, number: signal.Signals) -> None:
    options = ("--arm", "fix:flag=--hang", "--pairs", "1")
    said = interrupted(tmp_path, server(), *options, number=number)
    assert "stopped after 1 of 2 startups; `loadpeak ab --resume e` goes on" in said
    _, (first,) = read(tmp_path)
    resumed = loadpeak(tmp_path, "ab", "--resume", "e", "--ready-timeout", "1")
    assert resumed.returncode == 1, "the second arm hangs again"
    _, evidence = read(tmp_path)
    assert arms(evidence) == [(0, "baseline"), (0, "fix")]
    assert evidence[0].startup == first.startup, "a startup that is over is not repeated"


def test_two_signals_at_once_leave_no_engine(tmp_path: Path) -> None:
    """As when a service manager and a terminal end us together."""
    options = ("--arm", "fix:flag=--hang", "--pairs", "1")
    interrupted(tmp_path, server(), *options, number=signal.SIGTERM, again=0.0)


def test_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    interrupted(tmp_path, server(), "--arm", "fix:flag='--hang --stubborn'", "--pairs", "1", again=0.3)
    assert time.monotonic() - begun < 20, "the engine would have had 30 s to end"
    assert not lives(pid_in(log_of(tmp_path, arm="fix"), "child"))


def test_engine_left_by_a_killed_runner_is_named_before_anything_starts(tmp_path: Path) -> None:
    command = [*LOADPEAK, "ab", "--experiment", "e", "--pairs", "1", *server("--hang")]
    with subprocess.Popen(command, env=environ(tmp_path), stderr=subprocess.PIPE) as runner:
        engine = pid_in(log_of(tmp_path), "engine")
        running = loadpeak(tmp_path, "ab", "--resume", "e")
        runner.kill()
    assert "experiment e is being run already" in running.stderr
    resumed = loadpeak(tmp_path, "ab", "--resume", "e")
    assert resumed.returncode == 2
    assert f"process {engine} is left of a startup that was broken off" in resumed.stderr
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: not lives(engine), 5)
    assert loadpeak(tmp_path, "ab", "--resume", "e", "--ready-timeout", "1").returncode == 1
    assert arms(read(tmp_path)[1]) == [(0, "baseline"), (0, "fix")]


def test_copied_experiment_is_one_of_its_own(tmp_path: Path) -> None:
    ab(tmp_path, "--pairs", "1", "--", "true")
    folder = tmp_path / "experiments"
    shutil.copytree(folder / "e", folder / "copy")
    (folder / "copy/startups.jsonl").unlink()
    loadpeak(tmp_path, "ab", "--resume", "copy")
    assert len(read(tmp_path, "copy")[1]) == len(read(tmp_path)[1]) == 2


def test_finished_experiment_is_not_run_again(tmp_path: Path) -> None:
    command = server()
    ab(tmp_path, "--pairs", "1", *command)
    before = read(tmp_path)
    done = ab(tmp_path, "--pairs", "1", *command)
    assert done.returncode == 0
    assert read(tmp_path) == before


def test_command_that_never_ran_can_be_corrected(tmp_path: Path) -> None:
    assert ab(tmp_path, "--", "true-", "serve").returncode == 2
    assert ab(tmp_path, "--pairs", "1", *server()).returncode == 0


def test_torn_line_of_a_killed_runner_is_written_over(tmp_path: Path) -> None:
    command = server()
    ab(tmp_path, "--pairs", "1", *command)
    path = tmp_path / "experiments" / "e" / "startups.jsonl"
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 20)
    assert len(read(tmp_path)[1]) == 1
    assert ab(tmp_path, "--pairs", "1", *command).returncode == 0
    assert arms(read(tmp_path)[1]) == [(0, "baseline"), (0, "fix")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment", "e", "--pairs", "3", "--", "true"], "another plan: its pairs 1 would become 3"),
        (["--experiment", "e", "--pairs", "1", "--", "false"], 'its command ["true"] would become ["false"]'),
        (["--resume", "e", "--", "false"], "experiment e runs another command (true)"),
        (["--resume", "other"], "no experiment 'other' in "),
        (["--resume", "e", "--pairs", "1"], "so --pairs cannot be given"),
        (
            ["--experiment", "é" * 150, "--", "true"],
            "cannot name an experiment: expected a name of at most 200 bytes",
        ),
        (["--experiment", "n", "--", "a\udcff"], "is no UTF-8, and the plan of an experiment is kept in it"),
        (["--arm", "x:flag='\"a'", "--", "true"], "cannot be read: No closing quotation"),
        (["--arm", "x:environment=~nobody-here/x", "--", "true"], "name a Python environment"),
        (["--arm", "x:environment=", "--", "true"], "name a Python environment"),
        (["--resume", "../e"], "'../e' cannot name an experiment"),
        (["--experiment", "a/b", "--", "true"], "'a/b' cannot name an experiment"),
        ([], "there is no command: expected `loadpeak ab … -- vllm serve MODEL …`"),
        (["--", "no-such-program"], "cannot run 'no-such-program'"),
        (["--arm", "x:release=banana", "--", "true"], "off, moe-layer, layer, threshold:SIZE"),
    ],
)
def test_plan_that_cannot_be_run_is_one_clear_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    ab(tmp_path, "--pairs", "1", "--", "true")
    done = loadpeak(tmp_path, "ab", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.splitlines()[-1].startswith("loadpeak: ")
