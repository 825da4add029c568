"""The names of the runs in a store, newest first, without reading the runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from loadpeak import run_folder

SETTLING_NS = 1_000_000_000
"""A folder that changed so recently may change again without a new time of modification."""


class _Known(NamedTuple):
    inode: int
    created_at_wall_seconds: float
    variant: str


class Listing:
    """Reads the header of each run once, and the store's folder only after it has changed.

    Threads may share it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._modified_ns = -1
        self._known: dict[str, _Known] = {}
        self._unknown: dict[str, int] = {}
        """Folders whose header cannot be read, or not yet, by name, with their inodes."""
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Names of run folders, newest run first; the same object as long as nothing has changed."""
        with self._lock:
            changed = self._look_for_folders()
            for name in sorted(self._unknown):
                header = run_folder.read_header(self._folder / name)
                if header is not None:
                    inode = self._unknown.pop(name)
                    self._known[name] = _Known(inode, header.created_at_wall_seconds, header.variant)
                    changed = True
            if changed:
                self._names = tuple(
                    sorted(self._known.keys() | self._unknown.keys(), key=self._age, reverse=True)
                )
            return self._names

    def variant(self, name: str) -> str | None:
        """The variant of a run that was listed; nothing where its header cannot be read."""
        known = self._known.get(name)
        return known.variant if known else None

    def place(self, name: str) -> tuple[str, int | None]:
        """Tells a run from a later one of the same name."""
        known = self._known.get(name)
        return name, known.inode if known else None

    def _look_for_folders(self) -> bool:
        """Whether folders have come or gone."""
        try:
            modified_ns = self._folder.stat().st_mtime_ns
            if modified_ns == self._modified_ns:
                return False
            with os.scandir(self._folder) as entries:
                found = {entry.name: entry.inode() for entry in entries if _is_folder(entry)}
        except OSError:
            found, modified_ns = {}, -1
        self._modified_ns = modified_ns if time.time_ns() - modified_ns > SETTLING_NS else -1
        before = {**{name: known.inode for name, known in self._known.items()}, **self._unknown}
        self._known = {name: known for name, known in self._known.items() if found.get(name) == known.inode}
        self._unknown = {name: inode for name, inode in found.items() if name not in self._known}
        return found != before

    def _age(self, name: str) -> tuple[float, str]:
        """When a run began; a folder without a header is as old as its last change."""
        known = self._known.get(name)
        if known is not None:
            return known.created_at_wall_seconds, name
        try:
            return (self._folder / name).stat().st_mtime, name
        except OSError:
            return 0.0, name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        entry.name.encode()
        return entry.is_dir()
    except (OSError, UnicodeEncodeError):
        # A link in a circle, or into a folder that we may not read; a name that no run of ours can have.
        return False
