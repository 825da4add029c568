"""The history is recorded from the device's start to the end of the startup, and what changes meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadpeak import memory_history, settings
from loadpeak.guard import Guard
from loadpeak.record import MemoryHistory, SettingsChange
from loadpeak.session import Session
from loadpeak.torch_allocator import SETTERS, TorchAllocator
from tests.fakes import AbsentAllocator, FakeAllocator, Lines, phase_of


class FakeHistory:
    """Notes what was asked of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.error = error

    def start(self, entries_limit: int) -> None:
        self.calls.append(f"start {entries_limit}")

    def write(self, path: Path) -> None:
        self.calls.append(f"write {path.name}")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.calls.append("stop")


class Startup:
    """A worker's startup with a history."""

    def __init__(
        self,
        folder: Path | None,
        allocator: FakeAllocator | None = None,
        history: FakeHistory | None = None,
        wanted: str = "5000",
    ) -> None:
        self.lines, self.allocator = Lines(), allocator or FakeAllocator()
        self.history = history or FakeHistory()
        self.session = Session(self.allocator, self.lines.append, is_out_of_memory=lambda error: True)
        recording = SimpleNamespace(
            session=self.session,
            settings=settings.load({"LOADPEAK_MEMORY_HISTORY": wanted}),
            folder=folder,
            worker=SimpleNamespace(rank=3),
            guard=Guard(),
        )
        memory_history.attach(cast(Any, recording), self.allocator, self.history)
        with phase_of(self.session, "init_device"):
            pass


def test_history_is_written_when_the_engine_is_ready(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    startup.session.ready()
    assert startup.history.calls == ["start 5000", "write history-3.pickle.gz", "stop"]
    line = startup.lines.one(MemoryHistory)
    assert (line.file, line.entries_limit) == ("history-3.pickle.gz", 5000)


def test_history_is_written_when_memory_runs_out(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    startup.session.failed(RuntimeError("CUDA out of memory"))
    assert startup.session.outcome == "oom"
    assert startup.history.calls[1] == "write history-3.pickle.gz"


def test_changes_of_the_settings_are_in_the_journal(tmp_path: Path) -> None:
    startup = Startup(tmp_path)
    startup.allocator.change_settings("expandable_segments:True,max_split_size_mb:20")
    startup.session.ready()
    startup.allocator.change_settings("max_split_size_mb:64")
    assert startup.lines.one(SettingsChange).settings == "expandable_segments:True,max_split_size_mb:20"


def test_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    startup = Startup(tmp_path, history=FakeHistory(OSError("disk full")))
    startup.session.ready()
    assert startup.history.calls[-1] == "stop"
    assert not startup.lines.of(MemoryHistory)


@pytest.mark.parametrize(
    ("folder", "allocator", "wanted"),
    [(None, None, "5000"), (Path("run"), AbsentAllocator(), "5000"), (Path("run"), None, "off")],
    ids=["no folder", "no CUDA", "not asked"],
)
def test_nothing_is_recorded_where_it_cannot_or_need_not(
    folder: Path | None, allocator: FakeAllocator | None, wanted: str
) -> None:
    startup = Startup(folder, allocator, wanted=wanted)
    startup.session.ready()
    assert startup.history.calls == []


@pytest.mark.parametrize("name", SETTERS)
def test_setter_is_followed_and_put_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A snapshot to read the settings from would take longer with every event."""
    called: list[str] = []
    fake = SimpleNamespace(
        _C=SimpleNamespace(
            **{name: called.append, "_accelerator_getAllocatorSettings": lambda: "expandable_segments:True"}
        ),
        cuda=SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", cast(Any, fake))
    told: list[str] = []
    allocator, guard = TorchAllocator(), Guard()
    stop = allocator.follow_settings(told.append, guard)
    getattr(fake._C, name)("max_split_size_mb:20")
    assert called == ["max_split_size_mb:20"]
    assert told == ["expandable_segments:True,max_split_size_mb:20"] == [allocator.settings()]
    getattr(fake._C, name)("no conf string")
    assert guard.errors == 1, "what we cannot read is PyTorch's to judge"
    stop()
    getattr(fake._C, name)("max_split_size_mb:64")
    assert len(told) == 1
    assert allocator.settings() == "expandable_segments:True"
