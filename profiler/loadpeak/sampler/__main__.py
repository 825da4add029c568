"""``python -m loadpeak.sampler FILE RANK PID INTERVAL``: started by the rank whose device it reads.

Orders come on standard input, one a line. The process leaves the rank's session and ignores
interrupts, because it has to outlive the rank to record how that ended; it ends by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from loadpeak.journal import Journal
from loadpeak.record import Device, Line, SamplerStart, SamplerWarning
from loadpeak.sampler.devices import Nvml, Source, resident
from loadpeak.sampler.loop import Loop


class ParentRank:
    """The rank, which is the parent of this process and writes orders to its standard input."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._rest = b""
        os.set_blocking(0, False)

    def orders(self) -> list[tuple[str, str]]:
        """Orders that have come since the last call."""
        try:
            self._rest += os.read(0, 65536)
        except (BlockingIOError, OSError):
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [(order, argument) for order, _, argument in (line.decode().partition(" ") for line in lines)]

    def alive(self) -> bool:
        """Whether the rank is still our parent: children of a dead process get another."""
        return os.getppid() == self.pid

    def ending(self) -> tuple[int | None, int | None]:
        """Exit code and signal, readable while the rank is a zombie (``/proc/PID/stat``, last field)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None, None
        if stat[0] != "Z":
            return None, None
        status = int(stat[-1])
        if os.WIFSIGNALED(status):
            return None, os.WTERMSIG(status)
        return os.waitstatus_to_exitcode(status), None


class RealDevices:
    """NVML if it can be had; the reason is kept if not."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.problem: str | None = None
        self._nvml: Nvml | None = None
        try:
            self._nvml = Nvml()
        except Exception as error:  # noqa: BLE001 - NVML has its own errors, and may be missing in several ways
            self.problem = f"no NVML here ({error})"

    def candidates(self) -> dict[str, tuple[Device, Source]]:
        """Every GPU, by UUID."""
        if self._nvml is None:
            return {}
        return {device.uuid or "": (device, read) for device, read in self._nvml.all()}

    def find(self, uuid: str) -> tuple[Device, Source]:
        """The device of this UUID."""
        if self._nvml is None:
            raise LookupError(self.problem)
        return self._nvml.by_uuid(uuid)

    def resident(self) -> tuple[Device, Source]:
        """The rank's resident memory."""
        return resident(self._pid)


def _append(journal: Journal, line: Line) -> None:
    """Write a line, and before it, as soon as that is possible again, that others were lost."""
    if lost := journal.lost:
        text = f"{lost} samples were lost, {journal.path} could not be written: peaks may be too low"
        journal.lost = 0
        journal.append(SamplerWarning(at_seconds=line.at_seconds, message=text))
        journal.lost = lost if journal.lost else 0
    journal.append(line)


def main(path: str, rank: str, pid: str, interval: str) -> None:
    """Sample for the rank with this process id into this file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    journal = Journal(Path(path))
    journal.append(
        SamplerStart(
            at_seconds=time.monotonic(),
            at_wall_seconds=time.time(),
            rank=int(rank),
            interval_seconds=float(interval),
            pid=os.getpid(),
        )
    )
    loop = Loop(
        ParentRank(int(pid)),
        RealDevices(int(pid)),
        partial(_append, journal),
        time.monotonic,
        time.sleep,
        float(interval),
    )
    try:
        loop.run()
    except Exception as error:
        text = f"the sampler failed: {type(error).__name__}: {error}"
        journal.append(SamplerWarning(at_seconds=time.monotonic(), message=text))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
