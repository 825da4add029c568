"""The root of the command line. Commands come from the entry point group ``loadpeak.commands``.

Only the command that is called is imported. Only :func:`main` prints an error and exits.
"""

import errno
import io
import os
import sys
from importlib.metadata import EntryPoint
from typing import TextIO

import typer

from loadpeak import __version__, parts
from loadpeak.errors import LoadpeakError

ORDER = ("run", "runs", "compare", "ab", "report", "whatif", "patch", "serve", "dashboards", "demo")
"""The order in which ``--help`` lists commands; others follow."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""How a write fails where the place is full, or its reader is gone."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"loadpeak {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Records the memory peaks of vLLM startups, compares them, and ships the fix."""


def _wanted(arguments: list[str]) -> list[EntryPoint]:
    """The command that is called, or all of them where none is (``--help``)."""
    commands = {entry.name: entry for entry in parts.find(parts.COMMANDS)}
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    if called in commands:
        return [commands[called]]
    order = {name: place for place, name in enumerate(ORDER)}
    return sorted(commands.values(), key=lambda entry: (order.get(entry.name, len(order)), entry.name))


def build(arguments: list[str]) -> typer.Typer:
    """The command line for these arguments: an entry point is a function or a typer app of its own."""
    app = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    for entry in _wanted(arguments):
        loaded = entry.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=entry.name)
        else:
            app.command(name=entry.name)(loaded)
    return app


def main() -> None:
    """Run the command line; an error of our own is one line on standard error and exit status 2.

    Output that cannot be written is one line too, and exit status 1; a closed pipe wants no words.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths that are no UTF-8, and terminals that show less than it.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            build(sys.argv[1:])()
        except SystemExit:
            # Now, not when the interpreter ends: it would say "Exception ignored" in lines of its own.
            _flush()
            raise
    except KeyboardInterrupt:
        # While the command's code was being imported; commands themselves have words for it.
        sys.exit(130)
    except LoadpeakError as error:
        print(f"loadpeak: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _give_up(sys.stdout)
        if error.errno != errno.EPIPE:
            what = error.filename or "the output"
            print(f"loadpeak: {what} cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _flush() -> None:
    """Write what is left of the output; messages that nobody can read are no error.

    Raises:
        OSError: standard output cannot be written.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere, or the interpreter tries again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
