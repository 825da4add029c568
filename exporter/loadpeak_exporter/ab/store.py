"""The folder of an experiment: what was planned, the startups that are over, and their evidence."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadpeak import run_folder, settings
from loadpeak.errors import CommandError
from loadpeak.record import EngineSettings, WeightHashes, WeightsHashed
from loadpeak_exporter.ab.records import FORMAT, Evidence, Experiment, Startup
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.tail import Tail

EXPERIMENTS = "experiments"
PLAN = "experiment.json"
STARTUPS = "startups.jsonl"


class _Format(msgspec.Struct, frozen=True):
    format: int


_formats = msgspec.json.Decoder(_Format)
_plans = msgspec.json.Decoder(Experiment)
_startups = msgspec.json.Decoder(Startup)


def experiment_folder(home: Path, name: str) -> Path:
    """Where an experiment is kept.

    Raises:
        CommandError: the name is a path, not a name.
    """
    if settings.load({"LOADPEAK_EXPERIMENT": name}).experiment != name:
        raise CommandError(f"{name!r} cannot name an experiment: expected {settings.NAME}")
    return home / EXPERIMENTS / name


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep others from running the same experiment meanwhile.

    Raises:
        CommandError: somebody runs it now, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        # Some network file systems have no locks for folders; there we go on without.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CommandError(
                    f"experiment {folder.name} is being run already; wait for its end, or give this one "
                    "another --experiment name"
                ) from None
        yield
    finally:
        os.close(descriptor)


def read_plan(folder: Path) -> Experiment:
    """What was planned.

    Raises:
        CommandError: there is no such experiment, or its plan cannot be read.
    """
    path = folder / PLAN
    try:
        text = path.read_bytes()
        # The format comes first: one that is not ours may have other fields.
        form = _formats.decode(text).format
        experiment = _plans.decode(text) if form == FORMAT else None
    except FileNotFoundError:
        known = sorted(found.parent.name for found in folder.parent.glob(f"*/{PLAN}"))
        there = f"there are {', '.join(known[-5:])}" if known else "there are none"
        raise CommandError(f"no experiment {folder.name!r} in {folder.parent}; {there}") from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    if experiment is None:
        raise CommandError(
            f"{path} has format {form}, this loadpeak reads {FORMAT}; use the loadpeak that wrote it"
        )
    # A folder that was copied or renamed is an experiment of its own.
    return msgspec.structs.replace(experiment, experiment=folder.name)


def write_plan(folder: Path, experiment: Experiment) -> None:
    """Write what is planned, in one step.

    Raises:
        CommandError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{PLAN}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(experiment), indent=2) + b"\n")
        temporary.replace(folder / PLAN)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}") from error


def read_startups(folder: Path) -> list[Startup]:
    """The startups that are over, oldest first; a torn last line was never finished and does not count.

    Raises:
        CommandError: a line is no startup.
    """
    path = folder / STARTUPS
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    startups = []
    for number, line in enumerate(lines, 1):
        try:
            startups.append(_startups.decode(line))
        except ValueError as error:
            raise CommandError(f"{path} line {number} is no startup: {error}") from error
    return startups


def append_startup(folder: Path, startup: Startup) -> None:
    """Add a startup that is over; what a killed writer left of a line is cut off first.

    Raises:
        CommandError: the folder cannot be written.
    """
    path = folder / STARTUPS
    try:
        with path.open("ab+") as file:
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.write(msgspec.json.encode(startup) + b"\n")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error


def read_experiment(home: Path, name: str) -> tuple[Experiment, tuple[Evidence, ...]]:
    """An experiment and all that is known of its startups so far.

    Args:
        home: ``$LOADPEAK_HOME``.
        name: the experiment's id.

    Raises:
        CommandError: there is no such experiment, or it is damaged.
    """
    folder = experiment_folder(home, name)
    experiment = read_plan(folder)
    store = RunStore(home)
    return experiment, tuple(evidence(store, startup) for startup in read_startups(folder))


def evidence(store: RunStore, startup: Startup) -> Evidence:
    """A startup with its run and with what the engine's ranks wrote down for the judge."""
    if startup.run is None:
        return Evidence(startup=startup)
    run = store.reader(startup.run).read()
    if not isinstance(run, RunRecord):
        return Evidence(startup=startup)
    weights: dict[int, dict[str, str]] = {}
    not_hashed: dict[int, dict[str, str]] = {}
    settings: dict[str, str] | None = None
    for rank in run.ranks:
        hashes: dict[str, str] = {}
        for line in Tail(run_folder.journal_path(store.folder / startup.run, rank.rank)).read():
            if isinstance(line, WeightHashes):
                hashes |= line.hashes
            elif isinstance(line, WeightsHashed) and line.tensors == len(hashes):
                weights[rank.rank] = hashes
                not_hashed[rank.rank] = line.not_hashed
            elif isinstance(line, EngineSettings) and settings is None:
                settings = line.settings
    return Evidence(
        startup=startup,
        run=run,
        weights=weights or None,
        not_hashed=not_hashed or None,
        settings=settings,
    )
