"""``loadpeak run``."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from loadpeak import run_folder, settings
from loadpeak.errors import SettingError
from loadpeak.journal import Journal
from loadpeak.record import CommandEnd
from loadpeak_exporter import launch, live
from loadpeak_exporter.child import Child
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import print_summary


def run(
    command: list[str] = typer.Argument(
        help="The command that starts vLLM, after `--`.", metavar="-- COMMAND"
    ),
    variant: str = typer.Option("", help="Name of what is tried; named after the fixes when left out."),
    experiment: str = typer.Option("", help="Name that groups runs which belong together."),
    release: str = typer.Option(
        "", help="Release cached blocks while loading: off, moe-layer, layer or threshold:SIZE."
    ),
    split_limit_: str = typer.Option(
        "", "--split-limit", help="keep leaves the allocator's own split limit in force while loading."
    ),
) -> None:
    """Record the startup of a command, and keep its output and exit code.

    Only the environment of the command is changed. The live view ends when the engine is ready or has
    failed; the command goes on.
    """
    environ = launch.environment(
        os.environ,
        LOADPEAK_CACHE_RELEASE=release,
        LOADPEAK_SPLIT_LIMIT=split_limit_,
        LOADPEAK_EXPERIMENT=experiment,
        LOADPEAK_VARIANT=variant or _variant(release, split_limit_),
    )
    home = settings.load().home
    folder = home / run_folder.RUNS / environ["LOADPEAK_RUN_ID"]
    if launch.has_folder(environ):
        raise SettingError("LOADPEAK_RUN_ID", folder.name, f"a name that no run in {folder.parent} has yet")
    reader = RunStore(home).reader(folder.name)

    def read() -> RunRecord | None:
        record = reader.read()
        return record if isinstance(record, RunRecord) else None

    console = Console(stderr=True)
    screen = console.is_terminal and sys.stdout.isatty()
    child = Child(command, environ, _printer(console) if screen else None)
    with child.signals():
        with _unseen():
            live.watch(console if screen else _plain(), read, lambda: not child.running or _decided(read()))
        record = read()
        if record is not None:
            with _unseen():
                print_summary(console, record)
        child.pass_through()
        code = child.wait()
    _note_end(folder, code)
    if record is None:
        reason = launch.nothing_recorded(command[0], environ, code)
        with _unseen():
            console.print(f"loadpeak: {reason}", style="yellow", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def _unseen() -> contextlib.AbstractContextManager[None]:
    """What cannot be shown (a full disk, a closed pipe) is left out: the command matters more.

    rich answers a closed pipe with SystemExit.
    """
    return contextlib.suppress(OSError, SystemExit)


def _variant(release: str, split: str) -> str:
    """What to call a run after its fixes; nothing for a run without any."""
    names = [release.replace(":", "-")] if release not in ("", "off") else []
    return "+".join(names + ["split-keep"] * (split == "keep"))


def _decided(record: RunRecord | None) -> bool:
    return record is not None and record.outcome != "loading"


def _plain() -> Console:
    """For plain lines: a live view would be in the way of a command that writes to the terminal itself."""
    return Console(stderr=True, force_terminal=False)


def _printer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(Text.from_ansi(line), soft_wrap=True)


def _note_end(folder: Path, code: int) -> None:
    """Write how the command ended, where there is a record to write it into."""
    with contextlib.suppress(OSError):
        journal = Journal(run_folder.command_path(folder))
        journal.append(CommandEnd(at_seconds=time.monotonic(), at_wall_seconds=time.time(), exit_code=code))
        journal.close()
