"""Reserved and live memory against the layer, for two settings: on a terminal, and as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rich.text import Text

from loadpeak.allocator.replay import LayerFigures
from loadpeak.allocator.sizes import MIB

_HEIGHT = 12
_WIDEST = 3
"""Characters for each layer, where there is room."""
_MARKS = (("●", "red"), ("◆", "green"), ("·", "bright_black"))
"""Reserved under the first and the second setting, and what is in use."""
_INKS = ("#c0392b", "#1e8449", "#7f8c8d")


class Chart(NamedTuple):
    """What is drawn.

    Attributes:
        titles: names of the two settings.
        columns: what stands below each value: ``load``, the layers' numbers, ``serve``.
        reserved: for each setting, the highest reserved memory in each column, bytes.
        live: the highest memory in use in each column, bytes, under the first setting.
    """

    titles: tuple[str, str]
    columns: tuple[str, ...]
    reserved: tuple[tuple[int, ...], tuple[int, ...]]
    live: tuple[int, ...]

    @property
    def lines(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Title and values of each line."""
        return (
            (f"reserved, {self.titles[0]}", self.reserved[0]),
            (f"reserved, {self.titles[1]}", self.reserved[1]),
            ("in use", self.live),
        )


def build(titles: tuple[str, str], first: Sequence[LayerFigures], second: Sequence[LayerFigures]) -> Chart:
    """A chart of two replays of one run; one that found no memory ends early."""
    longest = max(first, second, key=len)
    names = ["after" if figures.layer is None else f"{figures.layer}" for figures in longest[1:]]
    return Chart(
        titles,
        ("load", *names),
        (
            tuple(figures.reserved_peak_bytes for figures in first),
            tuple(figures.reserved_peak_bytes for figures in second),
        ),
        tuple(figures.allocated_peak_bytes for figures in first),
    )


def to_text(chart: Chart, width: int) -> Text:
    """The chart in characters, at most so many columns wide.

    Where more layers are drawn than fit, each column is the highest of some.
    """
    label = 9
    room = max(width - label - 6, 8)
    step, wide = -(-len(chart.columns) // room), min(max(room // len(chart.columns), 1), _WIDEST)
    lines = [
        [max(values[i : i + step]) for i in range(0, len(values), step) for _ in range(wide)]
        for _, values in chart.lines
    ]
    top = max(map(max, lines))
    text = Text()
    for row in range(_HEIGHT, -1, -1):
        text.append(f"{top * row / _HEIGHT / MIB:>{label - 1},.0f} " if row % 3 == 0 else " " * label)
        for column in range(max(map(len, lines))):
            here = [
                mark
                for mark, values in zip(_MARKS, lines, strict=True)
                if column < len(values) and round(values[column] / top * _HEIGHT) == row
            ]
            text.append(here[0][0] if here else " ", here[0][1] if here else "")
        text.append("\n")
    text.append(" " * label + _axis(chart.columns, step, wide) + "\n")
    for (mark, style), (title, _) in zip(_MARKS, chart.lines, strict=True):
        text.append(f"{mark} ", style)
        text.append(f"{title}\n")
    return text


def _axis(columns: Sequence[str], step: int, wide: int) -> str:
    """Names below the columns, where there is room for them."""
    axis = ""
    for place in range(0, len(columns), step):
        at = place // step * wide
        last = place + step >= len(columns)
        if (place == 0 or place // step % 10 == 1 or last) and len(axis) <= at:
            axis = axis.ljust(at) + columns[place] + " "
    return axis.rstrip()


def to_html(chart: Chart, recommendation: str) -> str:
    """The chart as a page that needs nothing else."""
    width, height, left, bottom = 900, 420, 80, 40
    top = max(max(values) for _, values in chart.lines)
    across = (width - left - 20) / max(len(chart.columns) - 1, 1)

    def point(place: int, value: int) -> str:
        return f"{left + place * across:.1f},{(1 - value / top) * (height - bottom - 20) + 20:.1f}"

    drawn: list[str] = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = point(0, int(top * share)).split(",")[1]
        drawn.append(f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        drawn.append(f'<text x="{left - 8}" y="{y}" dy="4" text-anchor="end">{top * share / MIB:,.0f}</text>')
    every = -(-len(chart.columns) // 16)
    for place, name in enumerate(chart.columns):
        if place in (0, len(chart.columns) - 1) or (
            place % every == 0 and place + every < len(chart.columns)
        ):
            x = left + place * across
            drawn.append(f'<text x="{x:.1f}" y="{height - 14}" text-anchor="middle">{escape(name)}</text>')
    legend: list[str] = []
    for (title, values), ink in zip(chart.lines, _INKS, strict=True):
        points = " ".join(point(place, value) for place, value in enumerate(values))
        dash = ' stroke-dasharray="5 4"' if ink == _INKS[-1] else ""
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{ink}" stroke-width="2"{dash}/>')
        legend.append(f'<li><span style="color:{ink}">━</span> {escape(title)}</li>')
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>loadpeak what if</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222 }}
svg {{ width: 100%; height: auto; font-size: 12px; fill: #555 }}
ul {{ list-style: none; padding: 0 }}
</style>
<h1>Reserved and live memory by layer, MiB</h1>
<p>{escape(recommendation)}</p>
<svg viewBox="0 0 {width} {height}" role="img" aria-label="Highest reserved memory in each layer">
{chr(10).join(drawn)}
</svg>
<ul>{"".join(legend)}</ul>
</html>
"""
