"""Run a command and stay out of its way: its output, its signals and its exit code are its own."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from loadpeak.errors import CommandError


class Child:
    """A running command.

    On a terminal its output comes through a pseudo-terminal, so that it keeps its colours, and is given
    to ``show`` line by line until :meth:`pass_through`; elsewhere it writes where we would.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], show: Callable[[str], None] | None
    ) -> None:
        """Start the command.

        Args:
            command: program and arguments.
            environ: its environment.
            show: takes its output, or nothing to let it write by itself.

        Raises:
            CommandError: there is no such program, or it cannot be run.
        """
        self._show = show
        ours = theirs = None
        if show is not None:
            ours, theirs = pty.openpty()
        try:
            self._process = subprocess.Popen(command, env=dict(environ), stdout=theirs, stderr=theirs)
        except OSError as error:
            raise CommandError(f"cannot run {command[0]!r}: {error.strerror}; is it on the PATH?") from error
        finally:
            if theirs is not None:
                os.close(theirs)
        self._reader: threading.Thread | None = None
        if ours is not None:
            self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
            self._reader.start()

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def pass_through(self) -> None:
        """From now on its output goes to our standard output as it comes."""
        self._show = None

    def wait(self) -> int:
        """Wait for its end.

        Returns:
            Its exit code; 128 and the signal's number if it was killed by one, as shells have it.
        """
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                code = self._process.wait()
                break
        if self._reader is not None:
            self._reader.join(2)
        return 128 - code if code < 0 else code

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Interrupts reach the child through the terminal and leave us alone; SIGTERM is passed on."""

        def forward(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _read(self, descriptor: int) -> None:
        rest = b""
        while True:
            try:
                data = os.read(descriptor, 65536)
            except OSError:  # the other end is closed: that is how a pseudo-terminal ends
                data = b""
            if self._show is None:
                sys.stdout.buffer.write(rest + data)
                sys.stdout.buffer.flush()
                rest = b""
            else:
                *lines, rest = (rest + data).split(b"\n")
                for line in [*lines, *([rest] if rest and not data else [])]:
                    # A carriage return overwrites the line: only the last state of a progress bar stays.
                    self._show(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))
            if not data:
                os.close(descriptor)
                return
