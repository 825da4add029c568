"""Figures and tables as people read them on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadpeak_exporter.compare import Comparison, Side
from loadpeak_exporter.records import DamagedRun, RankRecord, RunRecord

MIB = 1 << 20
ABSENT = "—"
AFTER_OOM = (
    "try --release moe-layer or --split-limit keep; or start once more with LOADPEAK_MEMORY_HISTORY=1000000 "
    "and ask `loadpeak whatif latest` what would have fitted"
)
WIDE, NARROW_COLUMNS = 100, 5
"""The list of runs has all its columns from this width on; a run's id has its variant anyway."""
SUMMARY_WIDE, SUMMARY_NARROW_COLUMNS = 80, 5
_STYLES = {"ready": "green", "loading": "cyan", "oom": "bold red", "failed": "red", "killed": "red"}


def mib(size: float | None, digits: int = 0) -> str:
    """Bytes as MiB, ``33,064``; a dash where there is no reading."""
    return ABSENT if size is None else f"{size / MIB:,.{digits}f}"


def mib_range(sizes: Sequence[int], digits: int = 0) -> str:
    """From the lowest to the highest in MiB; one figure where they look the same."""
    low, high = mib(min(sizes), digits), mib(max(sizes), digits)
    return low if low == high else f"{low} to {high}"


def outcome_text(outcome: str) -> str:
    """An outcome with its colour, as rich markup."""
    return f"[{_STYLES.get(outcome, 'yellow')}]{outcome}[/]"


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; columns whose name begins with ``>`` are figures, on the right."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in columns:
        right = column.startswith(">")
        empty.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return empty


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2,000 ranks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_runs(console: Console, runs: Sequence[RunRecord | DamagedRun]) -> None:
    """The run store as a table, newest first."""
    columns = ["run", "outcome", ">load peak\nMiB", ">headroom\nMiB", ">layers", "variant", "model"]
    rows = table(*columns[: None if console.width >= WIDE else NARROW_COLUMNS])
    for figures in rows.columns[1:NARROW_COLUMNS]:
        figures.no_wrap = True

    def add(*cells: str) -> None:
        rows.add_row(*cells[: len(rows.columns)])

    for run in runs:
        if isinstance(run, DamagedRun):
            add(escape(run.run), "[yellow]damaged[/]", *[""] * (len(columns) - 2))
            continue
        peaks = [rank.load_peak_bytes for rank in run.ranks if rank.load_peak_bytes is not None]
        rooms = [rank.load_headroom_bytes for rank in run.ranks if rank.load_headroom_bytes is not None]
        add(
            escape(run.run),
            outcome_text(run.outcome) + (" [yellow](damaged)[/]" if run.damage else ""),
            mib(max(peaks, default=None)),
            mib(min(rooms, default=None)),
            layers_text(run.ranks),
            escape(run.header.variant),
            escape((run.header.model or ABSENT).rstrip("/").rpartition("/")[2]),
        )
    console.print(rows)
    for run in runs:
        for damage in run.damage[:3]:
            line = f" line {damage.line_number}" if damage.line_number else ""
            console.print(f"{run.run}: {damage.file}{line} {damage.reason}", style="yellow", markup=False)


def layers_text(ranks: Sequence[RankRecord]) -> str:
    """Layers done, of those expected: that of the rank which is furthest behind."""
    known = [rank for rank in ranks if rank.layers_expected]
    if not known:
        return ABSENT
    slowest = min(known, key=lambda rank: rank.layers_done)
    if slowest.layers_done == slowest.layers_expected:
        return str(slowest.layers_expected)
    return f"{slowest.layers_done}/{slowest.layers_expected}"


def print_summary(console: Console, run: RunRecord) -> None:
    """How a startup went: one row a rank, then what is worth knowing."""
    columns: list[tuple[str, Callable[[RankRecord], str]]] = [
        (">rank", lambda rank: str(rank.rank)),
        ("outcome", lambda rank: outcome_text(rank.outcome)),
        (">load\npeak", lambda rank: mib(rank.load_peak_bytes)),
        (">\nheadroom", lambda rank: mib(rank.load_headroom_bytes)),
        (">\nretries", lambda rank: _count(rank.retries)),
        (">device\npeak", lambda rank: mib(rank.device_used_peak_bytes)),
        (">reserved\npeak", lambda rank: mib(rank.reserved_peak_bytes)),
        (">ready\nallocated", lambda rank: mib(rank.ready_allocated_bytes)),
    ]
    shown = columns if console.width >= SUMMARY_WIDE else columns[:SUMMARY_NARROW_COLUMNS]
    rows = table(*(name for name, _ in shown))
    for rank in run.ranks:
        rows.add_row(*(read(rank) for _, read in shown))
    console.print(
        f"\n[bold]run {escape(run.run)}[/] · {escape(run.header.variant)} · {outcome_text(run.outcome)} · MiB"
    )
    console.print(rows)
    for note in notes(run):
        console.print(note, style="yellow", markup=False)


def notes(run: RunRecord) -> list[str]:
    """What a person should know besides the figures: failures, inactive fixes, a degraded recording."""
    found: list[str] = []
    for rank in run.ranks:
        where = f"rank {rank.rank}: " if len(run.ranks) > 1 else ""
        if rank.failure is not None:
            phase = f" in {rank.failure.phase}" if rank.failure.phase else ""
            found.append(f"{where}{rank.failure.outcome}{phase}: {rank.failure.reason}")
            if rank.failure.outcome == "oom":
                found.append(AFTER_OOM)
        if rank.device is not None and rank.device.kind == "resident":
            found.append(f"{where}no GPU is in use: device figures are the resident memory of the process")
        if rank.sampler_warning:
            found.append(f"{where}{rank.sampler_warning}")
        if rank.hook_errors:
            found.append(f"{where}{plural(rank.hook_errors, 'hook error')}; the journal has them")
        found += [
            f"{where}{fix.name} {fix.value} is inactive: {fix.detail}" for fix in rank.fixes if not fix.active
        ]
    return list(dict.fromkeys(found))


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Baseline and fix side by side, in MiB."""
    before, after = comparison.baseline, comparison.fix
    rows = table("MiB", f">{escape(before.variant)}", f">{escape(after.variant)}", ">difference")
    figures = (
        ("worst device peak", "worst_device_peak_bytes", 0),
        ("worst reserved peak", "worst_reserved_peak_bytes", 0),
        ("allocated peak", "allocated_peak_bytes", 0),
        ("ready allocated", "ready_allocated_bytes", 3),
    )
    load_peaks = comparison.worst_load_peaks
    lines: list[tuple[str, Sequence[int | None], int]] = [("worst load peak", load_peaks, 0)]
    lines += [(name, [getattr(side, field) for side in (before, after)], n) for name, field, n in figures]
    for name, values, digits in lines:
        rows.add_row(name, *(mib(value, digits) for value in values), _difference(values, digits))
    rows.add_section()
    for name, read in _FACTS:
        rows.add_row(name, read(before), read(after), "")
    console.print(rows)
    reduction = comparison.load_peak_reduction_bytes
    if reduction:
        direction = "lower" if reduction > 0 else "higher"
        console.print(f"worst load peak: [bold]{mib(abs(reduction))} MiB {direction}[/]")
    equal = {
        True: "equal to the byte on every rank",
        False: "[red]different[/]",
        None: "not known for both runs",
    }[comparison.ready_allocated_equal]
    console.print(f"ready live allocation: {equal}")


_FACTS: tuple[tuple[str, Callable[[Side], str]], ...] = (
    ("outcome", lambda side: outcome_text(side.outcome)),
    ("allocator retries", lambda side: _count(side.allocator_retries)),
    ("layers", lambda side: _count(side.layers)),
    ("allocator setting", lambda side: escape(side.alloc_conf or "default")),
    ("run", lambda side: escape(side.run)),
)


def _count(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _difference(values: Sequence[int | None], digits: int) -> str:
    before, after = values
    if before is None or after is None:
        return ""
    return "0" if before == after else f"{(after - before) / MIB:+,.{digits}f}"
