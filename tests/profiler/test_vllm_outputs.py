"""A script's outputs are written down, and the script gets what it would have got without us."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadpeak import vllm_outputs
from loadpeak.guard import Guard


class SamplingParams:
    def __init__(self, logprobs: int | None = None) -> None:
        self.logprobs = logprobs

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)


class BeamSearchParams:
    pass


def request(params: Any, tokens: list[int], bad: float | None = None) -> SimpleNamespace:
    """What vLLM answers to one request with these sampling parameters."""
    asked = getattr(params, "logprobs", None) is not None
    logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens] if asked else None
    if logprobs and bad is not None:
        logprobs[0][tokens[0]].logprob = bad
    sequence = SimpleNamespace(
        token_ids=tokens,
        finish_reason="stop",
        stop_reason=7,
        logprobs=logprobs,
        cumulative_logprob=-float(sum(tokens)) if asked else None,
    )
    return SimpleNamespace(outputs=[sequence])


class LLM:
    """Answers each prompt with its length; remembers the sampling parameters it was called with."""

    bad: float | None = None

    def __init__(self) -> None:
        self.given: list[Any] = []

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def generate(
        self, prompts: list[str], sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[Any]:
        several = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        self.given += several
        return [
            request(params, [len(prompt)] * 2, self.bad)
            for prompt, params in zip(prompts, several, strict=True)
        ]

    def chat(self, messages: list[str], sampling_params: Any = None) -> list[Any]:
        return self.generate(messages, sampling_params)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = ModuleType("vllm.entrypoints.llm")
    module.LLM = type("LLM", (LLM,), dict(vars(LLM)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    guard = Guard()
    vllm_outputs.record_outputs(tmp_path / "outputs.jsonl", guard)
    found = module.LLM()
    found.guard = guard
    return found


def written(folder: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (folder / "outputs.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("method", ["generate", "chat"])
@pytest.mark.parametrize("params", [None, SamplingParams(), [SamplingParams(), SamplingParams()]])
def test_outputs_are_written_and_log_probabilities_stay_ours(
    llm: Any, tmp_path: Path, method: str, params: Any
) -> None:
    results = getattr(llm, method)(["a", "bcd"], params)
    assert written(tmp_path) == [
        {"prompt": 0, "token_ids": [1, 1], "stop_reason": "stop:7", "logprobs": [-1.0, -1.0]},
        {"prompt": 1, "token_ids": [3, 3], "stop_reason": "stop:7", "logprobs": [-3.0, -3.0]},
    ]
    for result in results:
        assert result.outputs[0].logprobs is None
        assert result.outputs[0].cumulative_logprob is None
    for given in params if isinstance(params, list) else [params]:
        assert given is None or given.logprobs is None, "the script's own object is untouched"
    assert llm.guard.errors == 0


def test_log_probabilities_that_the_script_asked_for_are_its_own(llm: Any, tmp_path: Path) -> None:
    asked = SamplingParams(logprobs=2)
    results = llm.generate(["a", "bcd"], [asked, SamplingParams()], use_tqdm=False)
    assert llm.given[0] is asked
    assert results[0].outputs[0].logprobs is not None
    assert results[1].outputs[0].logprobs is None
    assert [line["logprobs"] for line in written(tmp_path)] == [[-1.0, -1.0], [-3.0, -3.0]]


def test_calls_are_numbered_on(llm: Any, tmp_path: Path) -> None:
    llm.generate(["a"])
    llm.generate(["bc"])
    assert [line["prompt"] for line in written(tmp_path)] == [0, 1]


def test_parameters_of_another_kind_are_passed_on(llm: Any, tmp_path: Path) -> None:
    params = BeamSearchParams()
    llm.generate(["a"], params)
    assert llm.given == [params]
    assert written(tmp_path) == [{"prompt": 0, "token_ids": [1, 1], "stop_reason": "stop:7"}]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_value_that_is_not_finite_is_missing(llm: Any, tmp_path: Path, bad: float) -> None:
    type(llm).bad = bad
    llm.generate(["a"])
    assert written(tmp_path)[0]["logprobs"] == [None, -1.0]


def test_file_that_cannot_be_written_costs_the_script_nothing(llm: Any, tmp_path: Path) -> None:
    (tmp_path / "outputs.jsonl").mkdir()
    (result,) = llm.generate(["a"])
    assert result.outputs[0].token_ids == [1, 1]
    assert result.outputs[0].logprobs is None
    assert llm.guard.errors == 1


def test_error_of_the_engine_is_the_scripts_and_later_calls_are_recorded(llm: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        llm.generate(1)
    llm.generate(["a"])
    assert len(written(tmp_path)) == 1
