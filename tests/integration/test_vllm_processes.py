"""A real vLLM in several processes: tensor-parallel ranks, killed ranks, two engines on one host."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadpeak.record import Exporter, RankEnd, Ready, decode_header
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore
from tests.integration.conftest import SCRIPT, environment, lines_of

pytestmark = pytest.mark.vllm

Start = Callable[..., "subprocess.Popen[str]"]


def engine(
    background: Start, python: Path, model: Path, home: Path, scenario: dict[str, Any], **extra: str
) -> "subprocess.Popen[str]":
    """Start one scenario of ``engine_script.py`` and leave it running."""
    environ = environment(home, **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **extra})
    command = [python, SCRIPT, model, json.dumps([scenario])]
    return background(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def wait_for_output(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"the engine ended without {text!r}")


def only_run(home: Path) -> Path:
    (folder,) = (path for path in (home / "runs").iterdir() if path.is_dir())
    return folder


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text: str = response.read().decode()
        return text


def test_tensor_parallel_ranks_record_into_one_run_and_rank_0_exports_them(
    background: Start, vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    scenario = {"llm": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, "wait": True}
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    process = engine(background, vllm_python, tiny_model, tmp_path, scenario, **environ)
    wait_for_output(process, "SERVING")
    folder = only_run(tmp_path)
    header = decode_header((folder / "run.json").read_bytes())
    assert (header.tp_size, header.world_size) == (2, 2)
    (run,) = RunStore(tmp_path).runs()
    assert isinstance(run, RunRecord)
    assert run.outcome == "ready"
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.ranks[0].pid != run.ranks[1].pid
    assert all(rank.layers_done == 4 and rank.hook_errors == 0 for rank in run.ranks)
    assert not lines_of(folder / "rank-1.jsonl").of(Exporter)
    text = metrics(lines_of(folder / "rank-0.jsonl").one(Exporter).port)
    assert set(re.findall(r'loadpeak_layers_done\{[^}]*rank="(\d)"', text)) == {"0", "1"}
    begun = time.perf_counter()
    for _ in range(20):
        metrics(lines_of(folder / "rank-0.jsonl").one(Exporter).port)
    assert (time.perf_counter() - begun) / 20 < 0.05, "after ready a scrape costs next to nothing"
    samplers = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, check=False).stdout
    assert samplers == b"", "the samplers ended with the startup"


def test_rank_that_is_killed_in_the_middle_of_a_layer_leaves_its_record(
    background: Start, vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    process = engine(background, vllm_python, tiny_model, tmp_path, {"sabotage": "hang_in_layer"})
    wait_for_output(process, "HANGING")
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    device = only_run(tmp_path) / "device-0.jsonl"
    while not lines_of(device).of(RankEnd):
        assert time.monotonic() - killed_at < 5, "the sampler did not notice"
        time.sleep(0.02)
    end = lines_of(device).one(RankEnd)
    assert end.signal == signal.SIGKILL
    assert end.at_seconds - killed_at < 0.5
    (run,) = RunStore(tmp_path).runs()
    assert isinstance(run, RunRecord)
    assert run.outcome == "killed"
    rank = run.ranks[0]
    assert (rank.phase, rank.layers_done) == ("process_weights", 2)
    assert rank.device_used_bytes
    assert rank.updated_at_seconds > killed_at - 2, "nothing older than the last sign of life is lost"
    process.wait()


def test_two_engines_on_one_host_keep_apart(
    background: Start, vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    scenario = {"wait": True, "generate": False}
    pair = [engine(background, vllm_python, tiny_model, tmp_path, scenario) for _ in range(2)]
    for process in pair:
        wait_for_output(process, "SERVING")
    runs = [run for run in RunStore(tmp_path).runs() if isinstance(run, RunRecord)]
    assert len(runs) == 2
    ports = {run.run: int(str(run.ranks[0].exporter).rpartition(":")[2]) for run in runs}
    assert len(set(ports.values())) == 2, "the second found the first one's port in use"
    for name, port in ports.items():
        assert set(re.findall(r'run="([^"]+)"', metrics(port))) == {name}


def test_engine_starts_when_the_disk_is_full(
    background: Start,
    vllm_python: Path,
    tiny_model: Path,
    tmp_path: Path,
    need: Callable[[bool, str], None],
) -> None:
    home = tmp_path / "full"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "loadpeak-test", str(home)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    need(mounted, "a small file system cannot be mounted here (that takes root)")
    try:
        process = engine(background, vllm_python, tiny_model, home, {"wait": True})
        wait_for_output(process, "SERVING")
        (run,) = RunStore(home).runs()
        assert isinstance(run, RunRecord), "what fitted is there"
        process.kill()
        process.wait()
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_engine_starts_in_a_read_only_folder(
    background: Start,
    vllm_python: Path,
    tiny_model: Path,
    tmp_path: Path,
    need: Callable[[bool, str], None],
) -> None:
    home = tmp_path / "read-only"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "loadpeak-test", str(home)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    need(mounted, "a read-only file system cannot be mounted here (that takes root)")
    try:
        process = engine(background, vllm_python, tiny_model, home, {"wait": True})
        wait_for_output(process, "SERVING")
        assert list(home.iterdir()) == []
        process.kill()
        process.wait()
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_disabled_plugin_does_nothing_at_all(
    background: Start, vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    process = engine(background, vllm_python, tiny_model, tmp_path, {}, LOADPEAK_DISABLE="1")
    wait_for_output(process, '"ready": true')
    assert not (tmp_path / "runs").exists()


def test_loadpeak_run_shows_a_real_engine(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    """What the README tells: the command that is installed beside vLLM, around a vLLM script."""
    command = [vllm_python.parent / "loadpeak", "run", "--variant", "try", "--"]
    command += [vllm_python, SCRIPT, tiny_model, json.dumps([{}])]
    done = subprocess.run(
        [str(part) for part in command],
        env=environment(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'RESULT {"ready": true' in done.stdout
    assert "try · ready" in done.stderr
    assert "no GPU is in use: device figures are the resident memory of the process" in done.stderr
    folder = only_run(tmp_path)
    assert lines_of(folder / "rank-0.jsonl").one(Ready)
    assert (folder / "command.jsonl").exists()
    assert os.environ.get("LOADPEAK_RUN_ID") is None
