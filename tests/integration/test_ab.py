"""``loadpeak ab`` around a real vLLM on the CPU: a server, and a script."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadpeak_exporter.ab.records import Evidence, Experiment
from loadpeak_exporter.ab.store import read_experiment
from tests.conftest import free_port
from tests.integration.conftest import HERE, environment

pytestmark = pytest.mark.vllm

VERDICTS = {
    **dict.fromkeys(("ready", "weights", "outputs", "logprobs"), "passed"),
    **dict.fromkeys(("ready-allocation", "device-peak", "retries"), "not judged"),
    "settings": "failed",
}


def ab(python: Path, home: Path, *arguments: Any) -> tuple[Experiment, Evidence, Evidence]:
    """One pair; nothing of it may have failed, nor may anything be left.

    On a CPU the gate cannot pass: there is no device and no allocator, and a release is not in force.
    """
    command = [python.parent / "loadpeak", "ab", "--pairs", "1", "--experiment", "e", *arguments]
    done = subprocess.run(
        [str(part) for part in command],
        env=environment(home, VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    logs = "".join(path.read_text()[-2000:] for path in (home / "experiments/e").glob("*.log"))
    assert done.returncode == 1, done.stdout + done.stderr[-3000:] + logs
    verdicts = dict(re.findall(r"^ ([a-z-]+) +(passed|failed|not judged) ", done.stdout, re.MULTILINE))
    assert verdicts == VERDICTS, done.stdout
    experiment, (baseline, fix) = read_experiment(home, "e")
    left = subprocess.run(["pgrep", "-f", str(home)], capture_output=True, check=False).stdout
    assert left == b"", "no process is left"
    return experiment, baseline, fix


def same_weights_and_settings(baseline: Evidence, fix: Evidence) -> None:
    for found in (baseline, fix):
        assert found.run is not None
        assert (found.run.outcome, found.run.ranks[0].hook_errors) == ("ready", 0)
        assert found.startup.ready_after_seconds is not None
        assert found.weights is not None
        assert found.not_hashed == {0: {}}
    (before,), (after,) = (baseline.weights or {}).values(), (fix.weights or {}).values()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert "model.layers.3.mlp.experts.routed_experts.w13_weight" in (fix.weights or {})[0]
    assert baseline.settings == fix.settings
    assert (fix.settings or {})["model_config.dtype"] == "torch.bfloat16"
    assert [found.run.header.variant for found in (baseline, fix) if found.run] == ["baseline", "fix"]


def test_server_is_started_in_both_arms_and_answers_the_same(
    vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    server = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model]
    server += ["--port", free_port(), "--enforce-eager", "--max-model-len", "256", "--dtype", "bfloat16"]
    experiment, baseline, fix = ab(vllm_python, tmp_path, "--max-tokens", "5", "--", *server)
    same_weights_and_settings(baseline, fix)
    assert baseline.startup.outputs == fix.startup.outputs
    outputs = fix.startup.outputs or ()
    assert len(outputs) == len(experiment.prompts)
    for output in outputs:
        assert output.stop_reason in ("length", "stop")
        assert 0 < len(output.token_ids) <= 5
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        assert None not in output.logprobs


def test_script_runs_in_both_arms_and_sees_its_own_results(
    vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    _, baseline, fix = ab(vllm_python, tmp_path, "--", vllm_python, HERE / "llm_script.py", tiny_model)
    same_weights_and_settings(baseline, fix)
    assert baseline.startup.outputs == fix.startup.outputs
    outputs = fix.startup.outputs or ()
    assert [output.prompt for output in outputs] == [0, 1, 2]
    assert outputs[0].token_ids == outputs[2].token_ids
    assert outputs[0].logprobs == outputs[2].logprobs
    assert len(outputs[0].logprobs or ()) == 4
    log = (tmp_path / "experiments/e/1-fix.log").read_text()
    assert "PLAIN [(None, None), (None, None)]" in log
    assert "ASKED 4" in log
