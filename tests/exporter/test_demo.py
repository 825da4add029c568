"""``loadpeak demo`` with the two records that come with the package."""

import json
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from loadpeak_exporter.commands.demo import RECORDED, VARIANTS
from loadpeak_exporter.compare import compare
from loadpeak_exporter.host import Host
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunReader
from tests.exporter.test_run_command import LOADPEAK, environ

GIB = 1 << 30


def recorded(variant: str) -> RunRecord:
    record = RunReader(RECORDED / variant, Host.this()).read()
    assert isinstance(record, RunRecord)
    return record


def test_shipped_records_are_whole_and_show_what_the_release_does() -> None:
    baseline, fix = (recorded(variant) for variant in VARIANTS)
    for run in (baseline, fix):
        assert (run.outcome, run.damage) == ("ready", ())
        assert run.ranks[0].layers_done == 48
        assert run.header.engine_version == "0.26.0"
        assert run.header.alloc_conf == "expandable_segments:True"
        assert run.ranks[0].hook_errors == 0
    result = compare(baseline, fix)
    assert result.peak_reduction_bytes is not None
    assert result.peak_reduction_bytes > 15 * GIB
    assert result.ready_allocated_equal
    assert (result.baseline.allocator_retries, result.fix.allocator_retries) == (1, 0)
    assert sum(layer.released_bytes or 0 for layer in fix.ranks[0].layers) > 10 * GIB


def test_shipped_records_are_small() -> None:
    assert sum(path.stat().st_size for path in RECORDED.rglob("*.*")) < 400_000


def test_json_is_the_comparison_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LOADPEAK, "demo", "--once", "--json", "--speed", "50"],
        env=environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    printed = json.loads(done.stdout)
    expected = compare(*(recorded(variant) for variant in VARIANTS))
    for side, want in (("baseline", expected.baseline), ("fix", expected.fix)):
        assert printed[side]["layers"] == 48
        assert printed[side]["worst_reserved_peak_bytes"] == want.worst_reserved_peak_bytes
        assert printed[side]["ready_allocated_bytes"] == want.ready_allocated_bytes
        assert printed[side]["allocator_retries"] == want.allocator_retries
    assert printed["ready_allocated_equal"] is True
    assert "process_weights" in done.stderr
    assert not (tmp_path / "runs").exists(), "the demo leaves the run store alone"


def test_metrics_are_served_meanwhile_and_afterwards(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*LOADPEAK, "demo", "--speed", "20"],
        env={**environ(tmp_path), "LOADPEAK_PORT": "19838", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        match = re.search(r"http\S+", process.stdout.readline())
        assert match is not None
        seen: set[str] = set()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and "both" not in seen:
            with urllib.request.urlopen(match[0], timeout=5) as response:
                text = response.read().decode()
            seen.update(re.findall(r'loadpeak_phase\{[^}]*phase="(\w+)"\} 1', text))
            if text.count('outcome="ready"} 1') == 2:
                seen.add("both")
            time.sleep(0.05)
        assert {"process_weights", "ready", "both"} <= seen
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("loadpeak-demo-*")), "nothing is left"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LOADPEAK_HOST", "192.0.2.1", "cannot listen on 192.0.2.1"),
        ("LOADPEAK_HOST", "no-such-host.invalid", "cannot listen on no-such-host.invalid"),
        ("LOADPEAK_PORT", "banana", "LOADPEAK_PORT='banana' cannot be used"),
    ],
)
def test_demo_that_cannot_listen_says_so(tmp_path: Path, name: str, value: str, message: str) -> None:
    done = subprocess.run(
        [*LOADPEAK, "demo", "--once", "--speed", "100"],
        env={**environ(tmp_path), name: value, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("loadpeak-demo-*"))
