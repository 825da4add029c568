"""The answers as people read them on a terminal, and as programs read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadpeak.allocator.sizes import MIB
from loadpeak.whatif.questions import Answer
from loadpeak.whatif.source import Source
from loadpeak.whatif.why import Hold, Why

_AGREES = 0.005
"""A replay of the run as it was may differ by so much of the peak before that is said."""
_HOLDS, _PINS = 8, 5
"""Rows of the two tables about the peak."""
_NARROW = 70
"""Columns of a terminal below which a row is told in its setting, its peak and what is left."""


def mib(size: int) -> str:
    """Bytes as MiB, ``33,064``."""
    return f"{size / MIB:,.0f}"


def size_text(size: int) -> str:
    """A size in the unit that suits it, ``1.5 MiB``."""
    for unit, name in ((MIB, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.4g} {name}"
    return f"{size} B"


def to_json(answers: Sequence[Answer], recommendation: str, with_split_limit: bool) -> str:
    """What ``--json`` prints; bytes, null for what is not known.

    Args:
        answers: ranked.
        recommendation: the sentence.
        with_split_limit: whether to say of each whether the program sets its split limit.
    """
    rows: list[dict[str, Any]] = []
    for answer in answers:
        question, outcome = answer.question, answer.outcome
        split_limit = {"split_limit": "keep" if question.keep_split_limit else "vllm"}
        rows.append(
            {
                "alloc_conf": question.alloc_conf,
                "release": question.release,
                **(split_limit if with_split_limit else {}),
                "capacity_bytes": question.capacity_bytes,
                "peak_reserved_bytes": outcome.peak_reserved_bytes,
                "peak_allocated_bytes": outcome.peak_allocated_bytes,
                "end_reserved_bytes": outcome.end_reserved_bytes,
                "retries": outcome.retries,
                "fits": answer.fits,
            }
        )
    found = {"settings": rows, "recommendation": recommendation}
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def print_answers(console: Console, answers: Sequence[Answer]) -> None:
    """The ranked table, in MiB; on a narrow terminal without the figures that matter least."""
    names = ["capacity", "peak", "live", "retained", "retries", "margin", "calls"]
    if console.width < _NARROW:
        names = ["capacity", "peak", "margin"]
    if len({answer.question.capacity_bytes for answer in answers}) == 1:
        names.remove("capacity")
    table = _table("setting", *(f">{name}" for name in names))
    for answer in answers:
        figures = _figures(answer)
        table.add_row(escape(answer.name), *(figures[name] for name in names))
    console.print(table)


def _figures(answer: Answer) -> dict[str, str]:
    """What stands in a row, by the name of its column."""
    outcome, capacity = answer.outcome, answer.question.capacity_bytes
    return {
        "capacity": "—" if capacity is None else mib(capacity),
        "peak": mib(outcome.peak_reserved_bytes),
        "live": mib(outcome.peak_allocated_bytes),
        "retained": mib(outcome.end_reserved_bytes - outcome.end_allocated_bytes),
        "retries": str(outcome.retries),
        "margin": _margin(answer),
        "calls": f"{outcome.calls:,}",
    }


def _margin(answer: Answer) -> str:
    if answer.fits is False:
        return "[bold red]no[/]"
    return "—" if answer.margin_bytes is None else mib(answer.margin_bytes)


def disagreement(source: Source, check: Answer) -> str | None:
    """What stands in the place of a recommendation where a replay as it was misses the recorded peak."""
    was = max(run.history.recorded_peak_bytes for run in source.devices)
    if not was or abs(check.outcome.peak_reserved_bytes - was) <= _AGREES * was:
        return None
    return (
        f"No recommendation: the recorded peak was {mib(was)} MiB, but a replay of the run as it was comes "
        f"to {mib(check.outcome.peak_reserved_bytes)} MiB. Settings that changed during the run are missing: "
        "give them with --timeline, or record the run with LOADPEAK_MEMORY_HISTORY."
    )


def notes(source: Source, answers: Sequence[Answer], capacity_asked: bool) -> list[str]:
    """What a person should know before trusting the table.

    Args:
        source: the recorded run.
        answers: what was asked.
        capacity_asked: whether a capacity was given.
    """
    found: list[str] = []
    if source.cut_off:
        found.append("the history lost its oldest events: record more of them (LOADPEAK_MEMORY_HISTORY)")
    if source.layers_from == "inferred":
        count = len(source.devices[0].boundaries)
        found.append(
            f"the layers are inferred: {count} repetitions in the history; a recording made by loadpeak has "
            "the real ones"
        )
    elif source.layers_from == "unknown":
        found.append("no layers were recorded or found: releases at layers cannot be predicted")
    if source.limit_bytes is not None and not capacity_asked:
        found.append(
            f"the recorded run found no memory at {mib(source.limit_bytes)} MiB reserved: that is taken as "
            "the capacity"
        )
    for run in source.devices:
        start = run.history.start.reserved_bytes
        if start > 64 * MIB:
            found.append(
                f"device {run.history.device}: {mib(start)} MiB were reserved before the recording begins; "
                "that part stays as it was in every replay"
            )
    layers = {b.layer for run in source.devices for b in run.boundaries if b.layer is not None}
    if source.layers_expected is not None and len(layers) < source.layers_expected:
        found.append(
            f"the recording ends after {len(layers)} of {source.layers_expected} layers; what comes after is "
            "not in these figures"
        )
    if len(source.devices) > 1:
        found.append(f"each row is the worst of {len(source.devices)} devices")
    for answer in answers:
        outcome = answer.outcome
        if outcome.failed_bytes is not None:
            where = "" if outcome.failed_layer is None else f" in layer {outcome.failed_layer}"
            found.append(f"{answer.name}: out of memory{where}, asking for {mib(outcome.failed_bytes)} MiB")
    return found


def print_why(console: Console, why: Why, title: str) -> None:
    """What holds the memory at the peak."""
    where = "outside the layers" if why.layer is None else f"in layer {why.layer}"
    free = why.reserved_bytes - why.live_bytes
    console.print(f"\n[bold]Why: the peak of {escape(title)}[/], {where}, MiB")
    console.print(
        f"{mib(why.reserved_bytes)} reserved = {mib(why.live_bytes)} in use + {mib(free)} free; of these "
        f"{mib(why.returnable_bytes)} could go back to the device and {mib(why.pinned_bytes)} are pinned."
    )
    if why.over_limit_bytes:
        console.print(
            f"{mib(why.over_limit_bytes)} of what is free lie in blocks that the split limit keeps from "
            "smaller requests."
        )
    table = _table("requested", ">size", ">in use", ">blocks", ">free since")
    for hold in why.holds[:_HOLDS]:
        size = "—" if hold.size == 0 else size_text(hold.size)
        table.add_row(hold.where, size, mib(hold.live_bytes), f"{hold.live_blocks:,}", mib(hold.free_bytes))
    rest = _sum(why.holds[_HOLDS:])
    table.add_row("all others", "", mib(rest.live_bytes), f"{rest.live_blocks:,}", mib(rest.free_bytes))
    console.print(table)
    if why.pins:
        console.print("Segments kept from the device by small blocks:")
        table = _table("blocks of", "sizes, most frequent first", ">in use", ">pinned free", ">segments")
        for pin in why.pins[:_PINS]:
            table.add_row(
                pin.where,
                ", ".join(size_text(size) for size in pin.sizes),
                f"{pin.live_bytes / MIB:,.1f}",
                f"{pin.free_bytes / MIB:,.1f}",
                f"{pin.segments:,} × {size_text(pin.segment_bytes)}",
            )
        console.print(table)


def _sum(holds: Sequence[Hold]) -> Hold:
    return Hold(
        "",
        0,
        sum(hold.live_bytes for hold in holds),
        sum(hold.live_blocks for hold in holds),
        sum(hold.free_bytes for hold in holds),
    )


def _table(*columns: str) -> Table:
    """An empty table; columns whose name begins with ``>`` are figures, on the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        figures = column.startswith(">")
        # Words are folded where they do not fit: rows whose ends were cut could not be told apart.
        table.add_column(
            column.lstrip(">"), justify="right" if figures else "left", no_wrap=figures, overflow="fold"
        )
    return table
