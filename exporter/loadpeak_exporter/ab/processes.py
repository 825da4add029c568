"""A command in a session of its own, and every process that came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
        with log.open("wb") as output:
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

    def stop(self) -> int:
        """End it and everything that it started: interrupt, then SIGTERM, then SIGKILL.

        Returns:
            Its exit code.

        Raises:
            KeyboardInterrupt: we were interrupted meanwhile; everything was killed at once then.
            CommandError: a process cannot even be killed.
        """
        with _noted_interrupts() as hurry:
            for number, everywhere, seconds in (
                (signal.SIGINT, False, INTERRUPT_SECONDS),
                (signal.SIGTERM, False, TERMINATE_SECONDS),
                # The samplers, which have sessions of their own, may still write down how their ranks ended.
                (signal.SIGKILL, False, SAMPLER_SECONDS),
                (signal.SIGKILL, True, KILL_SECONDS),
            ):
                if not self._living():
                    break
                if number == signal.SIGKILL or not hurry.is_set():
                    self._signal(number, everywhere)
                    self._wait(seconds, hurry if number != signal.SIGKILL else threading.Event())
            left = self._living()
        if left:
            pids = ", ".join(str(process.pid) for process in sorted(left))
            raise CommandError(f"process {pids} cannot be killed; end it before the next startup")
        if hurry.is_set():
            raise KeyboardInterrupt
        code = self.exit_code
        assert code is not None, "it is gone"
        return code

    def _signal(self, number: signal.Signals, everywhere: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for process in self._living() if everywhere else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _wait(self, seconds: float, hurry: threading.Event) -> None:
        deadline = time.monotonic() + seconds
        while self._living() and time.monotonic() < deadline and not hurry.is_set():
            time.sleep(POLL_SECONDS)

    def _living(self) -> set[Process]:
        """What is left of it: its session, and what descended from that when we looked before."""
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
        self._family |= found
        return found


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[threading.Event]:
    """Signals that ask us to end only set an event, so that nothing is left half stopped."""
    hurry = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: hurry.set())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield hurry
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
