"""Evidence is taken once the engine is ready and nothing measures it any more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadpeak import settings, torch_hashes, weight_hashes
from loadpeak.guard import Guard
from loadpeak.record import EngineSettings, Line, Ready, WeightHashes, WeightsHashed
from loadpeak.session import Session
from tests.fakes import FakeAllocator, Lines


class Tensor:
    """Four bytes that a fake hasher can tell apart."""

    def __init__(self, content: str) -> None:
        self.content = content

    def numel(self) -> int:
        return 2

    def element_size(self) -> int:
        return 2


class FakeHasher:
    def hash(self, tensor: Tensor) -> str:
        if tensor.content == "odd":
            raise torch_hashes.NotHashable("it is on the meta device")
        return f"hash of {tensor.content}"


class Startup:
    """A worker with two models."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        wanted: str = "on",
        folder: Path | None = Path("run"),
        history: bool = False,
    ) -> None:
        monkeypatch.setattr(torch_hashes, "Hasher", FakeHasher)
        monkeypatch.setattr(torch_hashes, "named_tensors", lambda model: model.items())
        self.lines, self.guard, self.sampler_ends = Lines(), Guard(), True
        self.session = Session(FakeAllocator(), self.write, guard=self.guard)
        self.waited: list[int] = []
        self.models: dict[str, dict[str, Tensor]] = {
            "": {
                "embed.weight": Tensor("e"),
                "layers.0.w": Tensor("a"),
                "layers.0.s": Tensor("b"),
                "layers.10.w": Tensor("odd"),
            },
            "draft.": {"layers.0.w": Tensor("c")},
        }
        recording = SimpleNamespace(
            session=self.session,
            settings=settings.load({"LOADPEAK_EVIDENCE": wanted}),
            folder=folder,
            guard=self.guard,
            worker=SimpleNamespace(
                settings=lambda: {"model_config.dtype": "bf16"}, models=lambda: self.models
            ),
            sampler_ended=self.sampler_ended,
        )
        self.written_history_at: int | None = None
        if history:
            self.session.after_init_device.append(lambda: self.session.at_end.append(self.write_history))
        weight_hashes.attach(cast(Any, recording))
        self.session.end_phase()
        self.lines.clear()

    def write(self, line: Line) -> None:
        self.lines.append(line)

    def write_history(self) -> None:
        self.written_history_at = len(self.lines)

    def sampler_ended(self, seconds: float) -> bool:
        self.waited.append(len(self.lines.of(WeightHashes)))
        return self.sampler_ends


def test_hashes_and_settings_are_written_after_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = Startup(monkeypatch)
    startup.session.ready()
    kinds = [type(line) for line in startup.lines]
    assert kinds == [Ready, EngineSettings, WeightHashes, WeightHashes, WeightHashes, WeightsHashed]
    assert startup.lines.one(EngineSettings).settings == {"model_config.dtype": "bf16"}
    assert {line.module: line.hashes for line in startup.lines.of(WeightHashes)} == {
        "": {"embed.weight": "hash of e"},
        "layers.0": {"layers.0.w": "hash of a", "layers.0.s": "hash of b"},
        "draft.layers.0": {"draft.layers.0.w": "hash of c"},
    }
    assert startup.waited == [0], "the sampler was waited for before the first tensor"


def test_hashing_comes_after_all_else_that_ends_the_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory history that is written at the end must not hold what hashing allocates."""
    startup = Startup(monkeypatch, history=True)
    startup.session.ready()
    assert startup.written_history_at == 1, "after the ready line and before any other"


def test_tensor_that_cannot_be_hashed_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = Startup(monkeypatch)
    startup.session.ready()
    end = startup.lines.one(WeightsHashed)
    assert end.not_hashed == {"layers.10.w": "NotHashable: it is on the meta device"}
    assert (end.tensors, end.size_bytes) == (4, 16)
    assert startup.guard.errors == 0


def test_many_hashes_are_spread_over_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take a line of more than a MiB for damage."""
    startup = Startup(monkeypatch)
    startup.models = {"": {f"w{number}": Tensor(str(number)) for number in range(2500)}}
    startup.session.ready()
    assert [len(line.hashes) for line in startup.lines.of(WeightHashes)] == [1000, 1000, 500]


def test_nothing_is_hashed_while_the_sampler_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = Startup(monkeypatch)
    startup.sampler_ends = False
    startup.session.ready()
    assert not startup.lines.of(WeightHashes)
    assert not startup.lines.of(WeightsHashed)
    assert startup.guard.errors == 1
    assert startup.lines.of(EngineSettings)


@pytest.mark.parametrize(
    ("wanted", "folder", "ready"),
    [("off", Path("run"), True), ("on", None, True), ("on", Path("run"), False)],
    ids=["not asked", "no folder", "failed"],
)
def test_no_evidence_is_taken_where_it_need_not(
    monkeypatch: pytest.MonkeyPatch, wanted: str, folder: Path | None, ready: bool
) -> None:
    startup = Startup(monkeypatch, wanted, folder)
    if ready:
        startup.session.ready()
    else:
        startup.session.failed(RuntimeError("no"))
    assert len(startup.lines) == 1
