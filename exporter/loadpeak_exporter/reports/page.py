"""A report as one HTML file that needs nothing else: the tables, and the charts of the built-in page."""

from __future__ import annotations

import importlib.resources
from html import escape
from pathlib import Path

import msgspec

from loadpeak.errors import CommandError
from loadpeak_exporter.reports.document import Report, Section, Table

PAGE = Path(__file__).parent.parent / "page"
_MARKED = {word: word for word in ("ready", "passed", "failed", "oom", "killed")} | {"not judged": "warning"}
"""Cells with a colour of their own."""
_SHORT = 16
"""Cells with fewer characters stay in one line."""
_CHARTS = """
<article><h2>Device memory, by seconds since start</h2><div class="chart" id="time"></div></article>
<article><h2>Memory, by layer</h2><div class="chart" id="layers"></div></article>
"""


def render(report: Report) -> str:
    """The page.

    Raises:
        CommandError: the package that draws the charts is not installed.
    """
    state = {True: "passed", False: "failed", None: ""}[report.passed]
    articles = [_section(section) for section in report.sections]
    if report.drawn:
        articles.insert(2, _CHARTS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>
{_ours("page.css")}
{_ours("report.css")}
</style>
</head>
<body>
<header><h1>{escape(report.title)}</h1></header>
<main class="report">
<p class="outcome {state}">{escape(report.summary)}</p>
{"".join(articles)}
</main>
{_scripts(report) if report.drawn else ""}
</body>
</html>
"""


def _ours(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _scripts(report: Report) -> str:
    """The charting library, the page's charts, and what they draw."""
    # In a script element only "<" can end it.
    drawn = msgspec.json.encode(report.drawn).decode().replace("<", "\\u003c")
    return f"""<script>{_plotly()}</script>
<script type="module">
{_ours("charts.js")}
drawReport({drawn});
</script>"""


def _plotly() -> str:
    try:
        script = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    except ModuleNotFoundError:
        raise CommandError(
            "an HTML report needs the package plotly for its charts, and it is not installed: "
            "pip install plotly, or use another --format"
        ) from None
    return script.read_text(encoding="utf-8")


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", *(f"<p>{escape(text)}</p>" for text in section.text)]
    if section.code is not None:
        parts.append(f"<pre>{escape(section.code)}</pre>")
    if section.table is not None:
        parts.append(_table(section.table))
    parts += [f'<p class="faint">{escape(text)}</p>' for text in section.after]
    return f"<article>{''.join(parts)}</article>\n"


def _table(table: Table) -> str:
    kinds = ["number" if name.startswith(">") else "" for name in table.columns]

    def row(tag: str, cells: tuple[str, ...]) -> str:
        marked = [
            (kind or _MARKED.get(cell, "short" if len(cell) < _SHORT else ""), cell)
            for kind, cell in zip(kinds, cells, strict=True)
        ]
        return "".join(f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for kind, cell in marked)

    head = tuple(name.removeprefix(">") for name in table.columns)
    lines = [row("th", head)] if any(head) else []
    lines += [row("td", cells) for cells in table.rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
