"""How far an experiment is: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from loadpeak_exporter.ab.records import Experiment, Startup
from loadpeak_exporter.live import REFRESH_SECONDS, PlainLines, ReadRun, View


class Progress:
    """Shows which startup runs, what it does, and how long all will take; a context."""

    def __init__(
        self, console: Console, experiment: Experiment, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._experiment, self._clock = console, experiment, clock
        self._total = experiment.pairs * len(experiment.arms)
        self._live: Live | None = None
        self._title = self._doing = ""
        self._view: View | None = None
        self._plain: PlainLines | None = None
        self._began = clock()
        self._durations: list[float] = []
        self._left = 0

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(
                self, console=self._console, refresh_per_second=1 / REFRESH_SECONDS, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, pair: int, arm: str, finished: Sequence[Startup]) -> None:
        """The next startup begins."""
        self._durations = [
            startup.ended_at_wall_seconds - startup.began_at_wall_seconds
            for startup in finished
            if startup.ended_at_wall_seconds is not None
        ]
        self._left = self._total - len(finished)
        self._title = f"pair {pair + 1} of {self._experiment.pairs} · {arm}"
        self._began = self._clock()
        self._view = self._plain = None
        self._doing = ""
        if self._live is None:
            self.say(f"{self._title} · startup {len(finished) + 1} of {self._total}{self._time_left()}")

    def watch(self, doing: str, read: ReadRun) -> None:
        """What the startup does now; ``read`` gives its run."""
        if self._live is not None:
            self._doing = doing
            self._view = self._view or View(read)
            return
        self._plain = self._plain or PlainLines(self._console, read)
        if doing == "starting":
            self._plain.tick()
        elif doing != self._doing:
            self.say(doing)
        self._doing = doing

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"loadpeak: {text}", markup=False, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        """From the median of the startups that are over; nothing before there is one."""
        if not self._durations:
            return ""
        each = statistics.median(self._durations)
        left = max(0.0, each * self._left - (self._clock() - self._began))
        return f" · about {left / 60:.0f} min left" if left > 90 else f" · about {left:.0f} s left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Text(
            f"{self._experiment.experiment} · {self._title} · {self._doing}{self._time_left()}", style="bold"
        )
        head.truncate(options.max_width, overflow="ellipsis")
        yield head
        if self._view is not None:
            yield self._view
