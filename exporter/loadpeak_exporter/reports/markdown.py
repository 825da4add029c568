"""A report as Markdown, to paste into a pull request."""

from __future__ import annotations

import re

from loadpeak_exporter.reports.document import Report, Section, Table


def render(report: Report) -> str:
    """The report's text; charts have no place in it."""
    parts = [f"## {_inline(report.title)}", f"**{_inline(report.summary)}**"]
    for section in report.sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"### {_inline(section.title)}", *map(_inline, section.text)]
    if section.code is not None:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", section.code)), default=0))
        parts.append(f"{fence}sh\n{section.code}\n{fence}")
    if section.table is not None:
        parts.append(_table(section.table))
    return [*parts, *map(_inline, section.after)]


def _table(table: Table) -> str:
    marks = ["---:" if name.startswith(">") else "---" for name in table.columns]
    rows = [[name.removeprefix(">") for name in table.columns], *table.rows]
    lines = ["| " + " | ".join(map(_inline, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join(marks) + "|", *lines[1:]])


def _inline(text: str) -> str:
    """Text that stays what it is: in one line, no markup of its own, no cell's end."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"([\\`*|<>\[\]~])", r"\\\1", text)
