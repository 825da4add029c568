"""``loadpeak patch``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loadpeak.errors import CommandError
from loadpeak_patches.targets import TARGETS

if TYPE_CHECKING:
    from loadpeak_patches.source.tree import PatchedFile

app = typer.Typer(
    help="The release as a source patch, for people who maintain a fork of vLLM.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_PATH = typer.Argument(help="A checkout of vLLM or of a fork, or the folder of an installed one.")
_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command("list")
def list_(as_json: bool = _JSON) -> None:
    """List the loaders that are known to leave large blocks in the cache."""
    if as_json:
        print(json.dumps([target._asdict() for target in TARGETS], indent=2))
        return
    for target in TARGETS:
        print(f"{target.engine:10} {target.weights:34} {target.name or '(any)'}")


@app.command()
def check(path: Path = _PATH, as_json: bool = _JSON) -> None:
    """Tell for each MoE loader: there already, applicable, or why not.

    The exit status is 0 when the release is in all of them, else 1.
    """
    findings = [(file.path, finding) for file in _files(path) for finding in file.findings]
    if as_json:
        entries = [{"file": file.as_posix(), **finding._asdict()} for file, finding in findings]
        print(json.dumps(entries, indent=2))
    else:
        for file, finding in findings:
            reason = f": {finding.reason}" if finding.reason else ""
            print(f"{finding.state:10} {file.as_posix()}:{finding.line} {finding.loader}{reason}")
    if any(finding.state != "there" for _, finding in findings):
        raise typer.Exit(1)


@app.command()
def diff(
    path: Path = _PATH,
    skip_refused: bool = typer.Option(False, help="Leave out loaders that are not understood."),
) -> None:
    """Print the patch as a unified diff that `git apply` takes."""
    for file in _understood(path, skip_refused):
        print(file.diff(), end="")


@app.command()
def apply(
    path: Path = _PATH,
    skip_refused: bool = typer.Option(False, help="Leave out loaders that are not understood."),
) -> None:
    """Write the release into the loaders' files: into all of them or, on any trouble, into none."""
    from loadpeak_patches.source import tree

    files = [file for file in _understood(path, skip_refused) if file.before != file.after]
    tree.write(path, files)
    for file in files:
        names = [finding.loader for finding in file.findings if finding.state == "applicable"]
        print(f"patched {file.path.as_posix()}: {', '.join(names)}")
    if not files:
        print("nothing to do: the release is in every loader that is understood")


def _files(path: Path) -> list[PatchedFile]:
    try:
        from loadpeak_patches.source import tree
    except ModuleNotFoundError as error:
        raise CommandError("this needs the package libcst: pip install libcst") from error
    files = list(tree.patched_files(path))
    if not files:
        raise CommandError(f"no MoE loader that drops its sources in {path}")
    return files


def _understood(path: Path, skip_refused: bool) -> list[PatchedFile]:
    """Files whose loaders are all understood, or the refusal."""
    files = _files(path)
    refused = [(file, finding) for file in files for finding in file.findings if finding.state == "refused"]
    if refused and not skip_refused:
        places = "; ".join(
            f"{file.path.as_posix()}:{finding.line} {finding.loader} {finding.reason}"
            for file, finding in refused
        )
        raise CommandError(
            f"{len(refused)} loaders are not understood and nothing was written: {places}. "
            "--skip-refused leaves them out"
        )
    return files
