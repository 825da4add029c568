"""Signals that ask us to end, however many come and whenever: none may leave an engine behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts signals; one is raised, once, and only where :meth:`raised` says that it may be. A context.

    Signals that we were told to ignore (``nohup``, a shell's background) stay without effect. They have a
    handler all the same, because a command would inherit the ignoring.
    """

    def __init__(self) -> None:
        self._count = 0
        self._may_raise = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        """Whether anybody wants us to end."""
        return self._count > 0

    @property
    def hurried(self) -> bool:
        """Whether somebody asked more than once."""
        return self._count > 1

    def __enter__(self) -> Interrupts:
        for number in _ASKING:
            ignored = signal.getsignal(number) == signal.SIG_IGN
            self._before[number] = signal.signal(number, _nothing if ignored else self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Here a signal becomes a KeyboardInterrupt, also one that came before."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    def check(self) -> None:
        """Raise what was asked for before.

        Raises:
            KeyboardInterrupt: somebody wants us to end.
        """
        if self.asked:
            self._may_raise = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._may_raise:
            self._may_raise = False
            raise KeyboardInterrupt


def _nothing(number: int, frame: FrameType | None) -> None:
    """Ignore a signal."""
