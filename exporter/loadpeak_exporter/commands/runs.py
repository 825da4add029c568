"""``loadpeak runs``."""

import msgspec
import typer
from rich.console import Console

from loadpeak import settings
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import print_runs


def runs(
    as_json: bool = typer.Option(False, "--json", help="Print the records as JSON, without their layers."),
) -> None:
    """List the recorded runs, newest first. A damaged one is listed with what is wrong with it."""
    store = RunStore(settings.load().home)
    found = store.runs()
    if as_json:
        short = [_without_layers(run) if isinstance(run, RunRecord) else run for run in found]
        print(msgspec.json.format(msgspec.json.encode(short), indent=2).decode())
    elif not found:
        print(f"no runs in {store.folder} yet; `loadpeak run -- vllm serve MODEL` makes one")
    else:
        print_runs(Console(), found)


def _without_layers(run: RunRecord) -> RunRecord:
    ranks = tuple(msgspec.structs.replace(rank, layers=()) for rank in run.ranks)
    return msgspec.structs.replace(run, ranks=ranks)
