"""``loadpeak report``."""

from __future__ import annotations

from pathlib import Path

import typer

from loadpeak import settings
from loadpeak.errors import CommandError, RunNotFoundError
from loadpeak_exporter import reports
from loadpeak_exporter.ab.store import EXPERIMENTS, PLAN, read_experiment
from loadpeak_exporter.reports.document import Report
from loadpeak_exporter.store import RunStore


def report(
    name: str = typer.Argument(
        help="An experiment, or a run: its id, a beginning of it, latest or latest:VARIANT.",
        metavar="RUN|EXPERIMENT",
    ),
    form: str = typer.Option("md", "--format", help=f"One of {', '.join(reports.FORMATS)}."),
    as_json: bool = typer.Option(False, "--json", help="The same as --format json."),
    output: Path = typer.Option(None, help="Write to this file instead of standard output."),
    redacted: bool = typer.Option(
        True, "--redact/--no-redact", help="Take host names, user names and paths out."
    ),
) -> None:
    """Report an experiment with its gate and statistics, or a single run.

    The exit status says nothing of the gate; that of `loadpeak ab` does.
    """
    form = "json" if as_json else form
    if form not in reports.FORMATS:
        raise CommandError(f"there is no format {form!r}: expected {', '.join(reports.FORMATS)}")
    text = reports.render(_find(name, redacted), form)
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from error


def _find(name: str, redacted: bool) -> Report:
    home = settings.load().home
    store = RunStore(home)
    if (home / EXPERIMENTS / name / PLAN).is_file():
        return reports.of_experiment(*read_experiment(home, name), store, redacted)
    try:
        return reports.of_run(store.find(name), store, redacted)
    except RunNotFoundError:
        if (store.folder / name).is_dir() or name.startswith("latest"):
            raise
        raise RunNotFoundError(
            f"no run and no experiment {name!r} in {home}; `loadpeak runs` lists the runs"
        ) from None
