"""More than anybody has: many runs, long journals, and requests that nobody would send."""

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadpeak.record import Sample, encode_line
from tests.exporter.building import Startup, copies
from tests.exporter.test_host_app import reached, serving
from tests.exporter.test_metrics import parse
from tests.profiler.test_sampler import wait_for

SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
MANY = 10_000
HIGH = 20 << 30


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as response:
        data: bytes = response.read()
        return data


@contextlib.contextmanager
def served(home: Path) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The host service, once it answers."""
    with serving(home) as (process, port):
        wait_for(lambda: reached(f"http://127.0.0.1:{port}/healthz"))
        yield process, port


def memory(process: "subprocess.Popen[str]") -> int:
    """MiB that the process has in use."""
    return int(psutil.Process(process.pid).memory_info().rss) >> 20


@pytest.mark.slow
def test_ten_thousand_runs_are_served_in_little_memory(tmp_path: Path) -> None:
    newest = Startup(tmp_path, "newest", wall=time.time(), created_at_wall_seconds=time.time()).load(4)
    source = Startup(tmp_path, "many").load(4).ready()
    copies(source.folder, MANY - 1, old=True)
    with served(tmp_path) as (process, port):
        assert {dict(labels)["run"] for _, labels in parse(get(port, "/metrics"))} == {"newest"}
        for begun in (time.monotonic(), time.monotonic()):
            found: dict[str, Any] = json.loads(get(port, f"/api/runs?limit=200&offset={MANY - 199}"))
            again = time.monotonic() - begun
        assert (found["total"], len(found["runs"])) == (MANY + 1, 200)
        assert found["runs"][-1]["run"] == "many"
        assert again < 1
        newest.ready()
        assert b'outcome="ready"} 1' in get(port, "/metrics")
        assert memory(process) < 250


@pytest.mark.slow
def test_journal_of_100_mb_that_grows_is_read_in_little_memory(tmp_path: Path) -> None:
    startup = Startup(tmp_path, "long", wall=time.time()).load(2)
    line = encode_line(
        Sample(at_seconds=6000.0, phase="process_weights", used_bytes=HIGH, phase_peak_bytes=HIGH)
    )
    with startup.samples.path.open("ab") as file:
        for _ in range(100):
            file.write(line * ((1 << 20) // len(line)))
    assert startup.samples.path.stat().st_size > 95 << 20
    stop = threading.Event()

    def grow() -> None:
        layer = 2
        while not stop.is_set():
            startup.convert(layer)
            layer += 1
            time.sleep(0.01)

    growing = threading.Thread(target=grow)
    with served(tmp_path) as (process, port):
        growing.start()
        try:
            done = []
            for _ in range(3):
                run = json.loads(get(port, "/api/runs/long"))
                assert run["damage"] == []
                done.append(run["ranks"][0]["layers_done"])
                time.sleep(0.1)
        finally:
            stop.set()
            growing.join()
        assert done == sorted(done)
        assert done[0] < done[-1]
        assert run["ranks"][0]["device_used_peak_bytes"] == HIGH
        points = json.loads(get(port, "/api/runs/long/timeline?points=100"))["device_used_bytes"]
        assert len(points) <= 101
        assert memory(process) < 400


def test_requests_that_nobody_would_send_get_documented_answers(tmp_path: Path) -> None:
    """Schemathesis makes requests out of the OpenAPI description, and holds the answers to it.

    Left out is what Starlette decides: of two routes with one path, ``Allow`` names the first one's method.
    """
    Startup(tmp_path, "one").load(2).ready()
    Startup(tmp_path, "two").load(2)
    (tmp_path / "runs" / "broken").mkdir()
    with served(tmp_path) as (_, port):
        done = subprocess.run(
            [
                SCHEMATHESIS,
                "run",
                f"http://127.0.0.1:{port}/openapi.json",
                *("--checks", "all", "--exclude-checks", "allow_header_conformance"),
                *("--max-examples", "100", "--no-color", "--generation-deterministic"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "generated" in done.stdout
