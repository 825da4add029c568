"""``loadpeak compare``."""

import msgspec
import typer
from rich.console import Console

from loadpeak import settings
from loadpeak_exporter.compare import Comparison
from loadpeak_exporter.compare import compare as compare_runs
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import notes, print_comparison


def compare(
    baseline: str = typer.Argument(help="A run: its id, a beginning of it, latest or latest:VARIANT."),
    fix: str = typer.Argument(help="The run to compare with it."),
    as_json: bool = typer.Option(
        False, "--json", help="Print the comparison as JSON; bytes, null for unknown."
    ),
) -> None:
    """Compare two recorded runs: peaks, headroom, and whether they hold the same when ready."""
    store = RunStore(settings.load().home)
    runs = [store.find(baseline), store.find(fix)]
    comparison = compare_runs(*runs)
    if as_json:
        print(to_json(comparison))
    else:
        console = Console()
        print_comparison(console, comparison)
        for run in runs:
            for note in notes(run):
                console.print(f"{run.header.variant}: {note}", style="yellow", markup=False)


def to_json(comparison: Comparison) -> str:
    """The comparison as the JSON that ``--json`` prints."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode()
