"""What is read of a worker for an experiment: its models, and settings that startups are compared by."""

from __future__ import annotations

import dataclasses
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from loadpeak.vllm_worker import Worker


class Mode(Enum):
    EAGER = 0


@dataclasses.dataclass
class Pass:
    fuse: bool = True


@dataclasses.dataclass
class CompilationConfig:
    mode: Mode = Mode.EAGER
    pass_config: Pass = dataclasses.field(default_factory=Pass)
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    ops: set[str] = dataclasses.field(default_factory=lambda: {"b", "a"})
    callback: Any = print
    passes: list[Any] = dataclasses.field(default_factory=lambda: [object()])
    compilation_time: float = 12.5


class AWQConfig:
    def __init__(self) -> None:
        self.weight_bits = 4


@dataclasses.dataclass
class CacheConfig:
    block_size: int = 16
    num_gpu_blocks: int = 1234
    num_gpu_blocks_override: int | None = None


class FakeWorker:
    """A worker object that can be referred to weakly."""

    def __init__(self, runner: Any) -> None:
        self.rank = self.local_rank = 0
        self.model_runner = runner
        self.vllm_config = SimpleNamespace(
            compilation_config=CompilationConfig(), cache_config=CacheConfig(), quant_config=AWQConfig()
        )


def settings_of(worker: FakeWorker) -> dict[str, str]:
    return Worker(worker, worker.vllm_config).settings()


def test_settings_are_flat_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(None)
    found = settings_of(worker)
    assert list(found) == sorted(found)
    assert found["compilation_config.mode"] == "Mode.EAGER"
    assert found["compilation_config.pass_config.fuse"] == "True"
    assert found["compilation_config.sizes"] == "['1', '2']"
    assert found["compilation_config.ops"] == "['a', 'b']"
    assert (found["quant_config"], found["quant_config.weight_bits"]) == ("AWQConfig", "4")
    assert found["cache_config.num_gpu_blocks_override"] == "None"


def test_what_differs_by_nature_is_left_out() -> None:
    found = settings_of(FakeWorker(None))
    assert "cache_config.num_gpu_blocks" not in found
    assert "compilation_config.compilation_time" not in found
    assert "compilation_config.callback" not in found
    assert " at 0x" not in str(found)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("VLLM_ATTENTION_BACKEND", True),
        ("VLLM_USE_V2_MODEL_RUNNER", True),
        ("VLLM_API_KEY", False),
        ("VLLM_PORT", False),
        ("VLLM_HOST_IP", False),
        ("VLLM_DIST_IDENT", False),
        ("VLLM_CACHE_ROOT", False),
        ("HOME", False),
    ],
)
def test_variables_of_vllm_are_settings_unless_they_are_a_process_own(
    monkeypatch: pytest.MonkeyPatch, name: str, kept: bool
) -> None:
    monkeypatch.setenv(name, "x")
    assert (name in settings_of(FakeWorker(None))) == kept


class Module:
    def named_modules(self) -> list[Any]:
        return []


@pytest.mark.parametrize("attribute", ["drafter", "speculator"])
def test_draft_model_comes_with_a_prefix(attribute: str) -> None:
    own, draft = Module(), Module()
    runner = SimpleNamespace(get_model=lambda: own, **{attribute: SimpleNamespace(model=draft)})
    worker = FakeWorker(runner)
    assert Worker(worker, worker.vllm_config).models() == {"": own, "draft.": draft}


def test_proposer_without_a_model_adds_none() -> None:
    own = Module()
    worker = FakeWorker(SimpleNamespace(get_model=lambda: own, drafter=SimpleNamespace()))
    assert Worker(worker, worker.vllm_config).models() == {"": own}
