"""``loadpeak dashboards``."""

from __future__ import annotations

from pathlib import Path

import typer

from loadpeak.errors import CommandError

app = typer.Typer(
    help="Grafana dashboards, Prometheus rules and Kubernetes manifests, built from code.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def dashboards() -> None:
    """Grafana dashboards, Prometheus rules and Kubernetes manifests, built from code."""


@app.command()
def build(
    out: Path = typer.Option(Path("dashboards/generated"), help="Folder to write into."),
    runbooks: str = typer.Option(
        "docs/runbooks", help="Where alerts say that their runbooks are: your copy's URL, for example."
    ),
    check: bool = typer.Option(
        False, "--check", help="Write nothing; fail if the folder is not what is built."
    ),
) -> None:
    """Write the dashboards, rules and manifests."""
    try:
        from loadpeak_dashboards import build as builder
    except ModuleNotFoundError as error:
        raise CommandError(f"this needs the package {error.name}: pip install grafanalib pyyaml") from error
    files = builder.build(runbooks.rstrip("/"))
    if not check:
        try:
            builder.write(out, files)
        except OSError as error:
            raise CommandError(
                f"{out} cannot be written: {error.strerror}; name a folder with --out"
            ) from None
        print(f"{len(files)} files in {out}")
        return
    different = builder.differences(out, files)
    if different:
        raise CommandError(f"{out} is not what is built: {', '.join(different)}; `loadpeak dashboards build`")
    print(f"{out} is up to date")
