"""Record the allocator's history during a startup, for ``loadpeak whatif`` (``LOADPEAK_MEMORY_HISTORY``).

It begins once the device is in use and is written into the run's folder when the startup is over, for better
or worse: an out-of-memory error leaves its history behind. Changes of the allocator's settings go into the
journal, which already holds the phases and the conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from loadpeak import run_folder, torch_history
from loadpeak.record import Memory, MemoryHistory, SettingsChange

if TYPE_CHECKING:
    from loadpeak.guard import Guard
    from loadpeak.recording import Recording


class Allocator(Protocol):
    """What is needed of the caching allocator (:class:`loadpeak.torch_allocator.TorchAllocator`)."""

    def read(self) -> Memory:
        """Current figures; all missing without CUDA."""

    def follow_settings(self, on_change: Callable[[str], None], guard: Guard) -> Callable[[], None]:
        """Tell each change of the settings; returns what ends that."""


class Source(Protocol):
    """Where the history comes from (:mod:`loadpeak.torch_history`)."""

    def start(self, entries_limit: int) -> None:
        """Keep the newest so many events from now on."""

    def write(self, path: Path) -> None:
        """Write what was kept."""

    def stop(self) -> None:
        """Keep nothing any more."""


def attach(recording: Recording, allocator: Allocator, source: Source = torch_history) -> None:
    """Record the history of a worker if asked to, and if there is a folder to write it into."""
    session, entries_limit = recording.session, recording.settings.memory_history
    if entries_limit is None or recording.folder is None:
        return
    path = run_folder.history_path(recording.folder, recording.worker.rank)

    def changed(settings: str) -> None:
        session.write(SettingsChange(at_seconds=session.clock(), settings=settings))

    def begin() -> None:
        if allocator.read().reserved_bytes is None:
            return
        stop_following = allocator.follow_settings(changed, recording.guard)
        source.start(entries_limit)
        session.at_end.append(lambda: end(stop_following))

    def end(stop_following: Callable[[], None]) -> None:
        stop_following()
        try:
            source.write(path)
        finally:
            source.stop()
        session.write(MemoryHistory(at_seconds=session.clock(), file=path.name, entries_limit=entries_limit))

    session.after_init_device.append(begin)
