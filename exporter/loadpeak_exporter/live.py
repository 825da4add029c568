"""A startup as it happens: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadpeak_exporter.records import RankRecord, RunRecord
from loadpeak_exporter.text import layers_text, mib, outcome_text

REFRESH_SECONDS = 0.2
PLAIN_SECONDS = 5.0
"""Without a terminal a line is printed at each change of phase, and this often in between."""

ReadRun = Callable[[], RunRecord | None]


class View:
    """The live view of one run: a headline, then two lines a rank. Fits any width."""

    def __init__(self, read: ReadRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._begun = clock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run = self._read()
        elapsed = f"{self._clock() - self._begun:.0f} s"
        if run is None or not run.ranks:
            yield Text(f"loadpeak: waiting for a vLLM worker · {elapsed}", style="dim", overflow="ellipsis")
            return
        head = Text.from_markup(
            f"[bold]loadpeak[/] {escape(run.header.variant)} · {outcome_text(run.outcome)} · {elapsed}"
        )
        head.truncate(options.max_width, overflow="ellipsis")
        rows: list[RenderableType] = [head]
        shown = run.ranks[: max(1, (options.max_height - 4) // 2)]
        for rank in shown:
            rows.append(_rank_line(rank, options.max_width, len(run.ranks) > 1))
            rows.append(_memory_line(rank, options.max_width))
        if len(shown) < len(run.ranks):
            rows.append(Text(f"and {len(run.ranks) - len(shown)} more ranks", style="dim"))
        yield Group(*rows)


def _rank_line(rank: RankRecord, width: int, several: bool) -> RenderableType:
    """Rank, phase and layer, with a bar for the layers."""
    name = f"rank {rank.rank} · " if several else ""
    layer = f" · layer {rank.layers_done} of {rank.layers_expected}" if rank.layers_expected else ""
    text = Text(f"  {name}{rank.phase}{layer} ", overflow="ellipsis", no_wrap=True)
    bar_width = min(40, width - text.cell_len - 1)
    if not rank.layers_expected or bar_width < 8:
        text.truncate(width, overflow="ellipsis")
        return text
    grid = Table.grid()
    grid.add_row(text, ProgressBar(total=rank.layers_expected, completed=rank.layers_done, width=bar_width))
    return grid


def _memory_line(rank: RankRecord, width: int) -> Text:
    """Device use, peak and headroom in MiB; reserved memory where there is room."""
    total = rank.device.total_bytes if rank.device else None
    parts = [f"used {mib(rank.device_used_bytes)}", f"load peak {mib(rank.load_peak_bytes)}"]
    if total is not None:
        parts.append(f"of {mib(total)} MiB")
        parts.append(f"headroom {mib(rank.load_headroom_bytes)}")
    elif rank.device is not None and rank.device.kind == "resident":
        parts.append("MiB resident")
    if rank.memory.reserved_bytes is not None:
        parts.append(f"reserved {mib(rank.memory.reserved_bytes)}")
    text = Text("    " + "  ".join(parts), style=_headroom_style(rank, total), no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    return text


def _headroom_style(rank: RankRecord, total: int | None) -> str:
    if total is None or rank.load_headroom_bytes is None:
        return ""
    share = rank.load_headroom_bytes / total
    return "red" if share < 0.05 else "yellow" if share < 0.1 else ""


def watch(console: Console, read: ReadRun, ended: Callable[[], bool]) -> None:
    """Show a run until ``ended``: live on a terminal, else as plain lines."""
    if console.is_terminal:
        with Live(View(read), console=console, refresh_per_second=1 / REFRESH_SECONDS, transient=True):
            while not ended():
                time.sleep(REFRESH_SECONDS / 2)
        return
    lines = PlainLines(console, read)
    while not ended():
        lines.tick()
        time.sleep(REFRESH_SECONDS / 2)
    lines.tick()


class PlainLines:
    """One line at each change of phase, and now and then in between."""

    def __init__(self, console: Console, read: ReadRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._read, self._clock = console, read, clock
        self._phases: tuple[str, ...] = ()
        self._said = clock()

    def tick(self) -> None:
        """Print a line if it is time for one."""
        run = self._read()
        if run is None or not run.ranks:
            return
        phases = tuple(rank.phase for rank in run.ranks)
        if phases != self._phases or self._clock() - self._said > PLAIN_SECONDS:
            self._phases, self._said = phases, self._clock()
            self._console.print(plain_line(run), markup=False, highlight=False, soft_wrap=True)


def plain_line(run: RunRecord) -> str:
    """A run in one line: the phase, the layer, and the rank with least headroom."""
    rank = max(run.ranks, key=lambda rank: rank.load_peak_bytes or 0)
    parts = [f"loadpeak: {rank.phase}"]
    if rank.layers_expected:
        parts.append(f"layers {layers_text(run.ranks)}")
    parts.append(f"device used {mib(rank.device_used_bytes)} · load peak {mib(rank.load_peak_bytes)} MiB")
    if rank.load_headroom_bytes is not None:
        parts.append(f"headroom {mib(rank.load_headroom_bytes)} MiB")
    return " · ".join(parts)
