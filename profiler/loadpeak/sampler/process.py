"""The worker's end of the sampler: start it, tell it phase and device, let it go."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from loadpeak.record import Phase


class SamplerProcess:
    """A running sampler. Telling it something never waits."""

    def __init__(self, path: Path, rank: int, interval_seconds: float) -> None:
        """Start the sampler for this process.

        Raises:
            OSError: the process could not be started.
        """
        command = [sys.executable, "-P", "-m", "loadpeak.sampler", str(path), str(rank), str(os.getpid())]
        self._process = subprocess.Popen(
            [*command, repr(interval_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin.fileno()
        os.set_blocking(self._orders, False)
        self._ended = threading.Event()

    @property
    def pid(self) -> int:
        """Process id of the sampler."""
        return self._process.pid

    def phase(self, phase: Phase) -> None:
        """The rank enters a phase.

        Raises:
            ChildProcessError: the sampler is gone.
        """
        self._tell(f"phase {phase}")

    def device(self, uuid: str | None) -> None:
        """The rank uses the GPU of this UUID, or none.

        Raises:
            ChildProcessError: the sampler is gone.
        """
        self._tell(f"device {uuid}" if uuid else "resident ")

    def stop(self) -> None:
        """The startup is over; the sampler takes a last sample and ends."""
        with contextlib.suppress(ChildProcessError):
            self._tell("stop ")
        threading.Thread(target=self._reap, name="loadpeak-reap", daemon=True).start()

    def ended(self, seconds: float) -> bool:
        """Wait at most so long for the end of a sampler that was stopped; whether it has ended."""
        return self._ended.wait(seconds)

    def _reap(self) -> None:
        self._process.wait()
        self._ended.set()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _tell(self, order: str) -> None:
        code = self._process.poll()
        if code is not None:
            raise ChildProcessError(f"the device sampler ended with {code}; device readings stop here")
        with contextlib.suppress(OSError):
            os.write(self._orders, order.encode() + b"\n")
