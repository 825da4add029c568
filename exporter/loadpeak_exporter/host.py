"""What a reader of records knows of the host it runs on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from loadpeak import run_folder
from loadpeak.record import Header


class Host(NamedTuple):
    """A host, its clocks and its processes; a test gives another."""

    boot_id: str | None
    pid_namespace: int | None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    proc: Path = Path("/proc")

    @classmethod
    def this(cls) -> Host:
        """The host of this process."""
        return cls(*run_folder.whereabouts())

    def shares_pids(self, header: Header) -> bool:
        """Whether a run's process ids mean something here: same boot, same pid namespace."""
        here = (self.boot_id, self.pid_namespace)
        return None not in here and (header.boot_id, header.pid_namespace) == here

    def lives(self, pid: int, recorded_at_seconds: float) -> bool:
        """Whether the process runs, and is not a later one that was given the same number."""
        try:
            stat = (self.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        state, started_at_ticks = stat[0], int(stat[19])
        started_at_seconds = started_at_ticks / os.sysconf("SC_CLK_TCK")
        return state != "Z" and started_at_seconds < recorded_at_seconds + 1.0
