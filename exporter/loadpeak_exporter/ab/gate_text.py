"""The gate as people read it on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from loadpeak_exporter.ab.gate import Verdict
from loadpeak_exporter.text import table

_VERDICTS = {True: "[green]passed[/]", False: "[bold red]failed[/]", None: "[yellow]not judged[/]"}


def print_gate(console: Console, verdict: Verdict) -> None:
    """One row for each rule of each arm, then what came of all."""
    several = any(entry.arm for entry in verdict.gate)
    rows = table(*(["arm"] if several else []), "rule", "verdict", "figures")
    for entry in verdict.gate:
        arm = [escape(str(entry.arm))] if several else []
        rows.add_row(
            *arm, entry.rule, _VERDICTS[entry.passed], escape(entry.detail.removeprefix("not judged: "))
        )
    console.print(rows)
    console.print("the gate passed" if verdict.passed else "the gate did not pass", style="bold")
