"""``loadpeak runs``."""

import os

import msgspec
import typer
from rich.console import Console

from loadpeak import settings
from loadpeak.errors import CommandError
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import print_runs


def runs(
    limit: int = typer.Option(50, min=1, help="List so many at most."),
    as_json: bool = typer.Option(False, "--json", help="Print the records as JSON, without their layers."),
) -> None:
    """List the recorded runs, newest first. A damaged one is listed with what is wrong with it."""
    store = RunStore(settings.load().home)
    found = store.runs(limit)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    elif not found and store.folder.exists() and not os.access(store.folder, os.R_OK | os.X_OK):
        raise CommandError(f"{store.folder} cannot be read; list it as the user that runs vLLM")
    elif not found:
        print(f"no runs in {store.folder} yet; `loadpeak run -- vllm serve MODEL` makes one")
    else:
        print_runs(Console(), found)
        older = len(store) - len(found)
        if older:
            print(f"and {older} older: loadpeak runs --limit {len(store)}")
