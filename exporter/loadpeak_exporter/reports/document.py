"""A report before it has a format: sections of text, tables and code, and what the charts draw."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadpeak_exporter.ab.gate import Verdict
from loadpeak_exporter.history import Timeline
from loadpeak_exporter.records import LayerRecord, RunRecord


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a report."""


class Table(_Struct, frozen=True):
    """Cells as text. A column whose name begins with ``>`` holds figures, on the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Section(_Struct, frozen=True):
    """A heading, then text, a table and code, as far as they are there."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    code: str | None = None
    after: tuple[str, ...] = ()
    """Text below the table."""


class Drawn(_Struct, frozen=True):
    """One startup in the charts: one of its ranks."""

    variant: str
    timeline: Timeline
    layers: tuple[LayerRecord, ...]
    device_total_bytes: int | None = None
    device_used_peak_bytes: int | None = None


class Report(_Struct, frozen=True):
    """Everything that a format shows."""

    title: str
    summary: str
    passed: bool | None
    """Whether a gate passed; missing for a single run."""
    sections: tuple[Section, ...]
    drawn: tuple[Drawn, ...]
    verdict: Verdict | None = None
    run: RunRecord | None = None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table from any sequences."""
    return Table(columns=tuple(columns), rows=tuple(map(tuple, rows)))
