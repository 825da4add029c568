"""The recording of a worker where the disk does not take everything."""

import multiprocessing.util
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadpeak import parts, recording, settings, torch_allocator
from loadpeak.guard import Guard
from loadpeak.record import Failure, Ready, decode_line
from loadpeak.recording import Recording
from loadpeak.session import Session
from tests.fakes import FakeAllocator


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What runs when the interpreter closes; the recordings have no sampler and no extensions."""
    found: list[Callable[[], None]] = []
    monkeypatch.setattr(
        multiprocessing.util, "Finalize", lambda of, callback, exitpriority: found.append(callback)
    )
    monkeypatch.setattr(torch_allocator, "TorchAllocator", FakeAllocator)
    monkeypatch.setattr(torch_allocator, "torch_version", lambda: None)
    monkeypatch.setattr(torch_allocator, "is_out_of_memory", lambda error: False)
    monkeypatch.setattr(parts, "find", lambda group: [])
    monkeypatch.setattr(recording, "SamplerProcess", lambda *_: None)
    return found


@pytest.fixture
def full_disk() -> Iterator[Callable[[Path], None]]:
    """Lets a file grow no more, until it is called again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [before]

    def turn(path: Path) -> None:
        full = (path.stat().st_size, before[1])
        limits.append(full if limits[-1] == before else before)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits[-1])

    yield turn
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("end", "kind"),
    [(Session.ready, Ready), (lambda session: session.failed(RuntimeError("broken")), Failure)],
    ids=["ready", "failed"],
)
def test_outcome_that_found_the_disk_full_is_written_when_the_process_ends(
    tmp_path: Path,
    ends: list[Callable[[], None]],
    full_disk: Callable[[Path], None],
    end: Callable[[Session], None],
    kind: type[Any],
) -> None:
    worker: Any = SimpleNamespace(rank=0, local_rank=0, facts={}, first_on_host=False)
    found = Recording(worker, settings.load({"LOADPEAK_HOME": str(tmp_path)}), Guard())
    assert found.folder is not None
    journal = found.folder / "rank-0.jsonl"
    full_disk(journal)
    end(found.session)
    full_disk(journal)
    assert len(journal.read_bytes().splitlines()) == 1
    (close,) = ends
    close()
    line = decode_line(journal.read_bytes().splitlines()[-1])
    assert isinstance(line, kind)
