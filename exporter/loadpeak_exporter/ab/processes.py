"""A command in a session of its own, and every process that came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loadpeak.errors import CommandError

INTERRUPT_SECONDS = 30.0
"""An engine may take so long to end after an interrupt, as from a terminal."""
TERMINATE_SECONDS = 10.0
"""And so long after SIGTERM, before it is killed."""
SAMPLER_SECONDS = 2.0
KILL_SECONDS = 60.0
POLL_SECONDS = 0.05


class Process(NamedTuple):
    """One process; its start tells it from a later one of the same number."""

    pid: int
    started_ticks: int


class _Stat(NamedTuple):
    parent: int
    group: int
    session: int


class Command:
    """A running command whose output goes into a file.

    It has a session of its own, so an interrupt from our terminal does not reach it before we want it to.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start it.

        Raises:
            CommandError: there is no such program, or it cannot be run.
        """
        self._family: set[Process] = set()
        self._mark = f"LOADPEAK_RUN_ID={environ['LOADPEAK_RUN_ID']}\0"
        try:
            output = log.open("wb")
        except OSError as error:
            raise CommandError(f"{log} cannot be written: {error.strerror}") from error
        with output:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandError(
                    f"cannot run {command[0]!r}: {error.strerror}; is it on the PATH?"
                ) from error

    @property
    def exit_code(self) -> int | None:
        """Its exit code, as shells have it; nothing while it runs."""
        code = self._process.poll()
        return None if code is None else 128 - code if code < 0 else code

    def stop(self, hurried: Callable[[], bool]) -> int:
        """End it and everything that it started: interrupt, then SIGTERM, then SIGKILL.

        Args:
            hurried: whether everything is to be killed at once.

        Returns:
            Its exit code.

        Raises:
            CommandError: a process cannot even be killed.
        """
        for number, everywhere, seconds in (
            (signal.SIGINT, False, INTERRUPT_SECONDS),
            (signal.SIGTERM, False, TERMINATE_SECONDS),
            # The samplers, which have sessions of their own, may still write down how their ranks ended.
            (signal.SIGKILL, False, SAMPLER_SECONDS),
            (signal.SIGKILL, True, KILL_SECONDS),
        ):
            if not self._living():
                break
            last = number == signal.SIGKILL
            if (last or not hurried()) and (self._signal(number, everywhere) or last):
                self._wait(seconds, (lambda: False) if last else hurried)
        left = self._living()
        if left:
            raise CommandError(f"process {pids(left)} cannot be killed; end it before the next startup")
        code = self.exit_code
        assert code is not None, "it is gone"
        return code

    def _signal(self, number: signal.Signals, everywhere: bool) -> bool:
        """Signal its session, and everything else that is left of it; whether the session was there."""
        for process in self._living() if everywhere else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _wait(self, seconds: float, hurried: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self._living() and time.monotonic() < deadline and not hurried():
            time.sleep(POLL_SECONDS)

    def _living(self) -> set[Process]:
        """What is left of it: its session, what descended from that when we looked before, and daemons."""
        self._process.poll()
        stats = _stats()
        found = {process for process in self._family if process in stats}
        found |= {
            process for process, stat in stats.items() if self._process.pid in (stat.group, stat.session)
        }
        while True:
            pids = {process.pid for process in found}
            more = {process for process, stat in stats.items() if stat.parent in pids} - found
            if not more:
                break
            found |= more
        # A daemon has another session and parent, but still the environment that it was started with.
        self._family |= found or marked(self._mark)
        return found or self._family & stats.keys()


def pids(processes: set[Process]) -> str:
    """Their numbers, in words."""
    return ", ".join(str(process.pid) for process in sorted(processes))


def marked(text: str, proc: Path = Path("/proc")) -> set[Process]:
    """Living processes with a variable that begins so in the environment that they were started with."""
    found = set()
    for process in _stats(proc):
        with contextlib.suppress(OSError):
            environ = (proc / str(process.pid) / "environ").read_bytes()
            if b"\0" + os.fsencode(text) in b"\0" + environ:
                found.add(process)
    return found


def _stats(proc: Path = Path("/proc")) -> dict[Process, _Stat]:
    """All living processes; zombies hold nothing any more and are left out."""
    found = {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            process = Process(int(path.parent.name), int(fields[19]))
            found[process] = _Stat(int(fields[1]), int(fields[2]), int(fields[3]))
    return found
