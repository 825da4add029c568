"""Run an experiment: one startup after another, whatever becomes of each."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from loadpeak.errors import CommandError
from loadpeak_exporter.ab import store
from loadpeak_exporter.ab.gpus import Emptiness
from loadpeak_exporter.ab.interrupts import Interrupts
from loadpeak_exporter.ab.plan import order, same_plan
from loadpeak_exporter.ab.processes import marked, pids
from loadpeak_exporter.ab.progress import Progress
from loadpeak_exporter.ab.records import Experiment, Startup
from loadpeak_exporter.ab.startup import Attempt, Limits
from loadpeak_exporter.store import RunStore


def prepare(home: Path, wanted: Experiment) -> Path:
    """The folder of an experiment, new or begun before with the same plan; one without startups is new.

    Raises:
        CommandError: an experiment of this name has another plan, or the folder cannot be used.
    """
    folder = store.experiment_folder(home, wanted.experiment)
    if not (folder / store.PLAN).exists() or not store.read_startups(folder):
        store.write_plan(folder, wanted)
        return folder
    difference = same_plan(store.read_plan(folder), wanted)
    if difference is not None:
        raise CommandError(
            f"experiment {wanted.experiment} has another plan: {difference}; "
            "give this one another --experiment name"
        )
    return folder


def run(
    home: Path,
    experiment: Experiment,
    *,
    environ: dict[str, str],
    limits: Limits,
    emptiness: Emptiness,
    progress: Progress,
) -> list[Startup]:
    """Run every startup of the plan that is not over yet.

    Returns:
        All startups of the experiment, in order.

    Raises:
        CommandError: the command cannot be run, its port is in use, or an engine is left of an earlier call.
        KeyboardInterrupt: somebody stopped us; the startup under way does not count and comes again.
    """
    folder = store.experiment_folder(home, experiment.experiment)
    finished = store.read_startups(folder)
    done = {(startup.pair, startup.arm) for startup in finished}
    gpus = _gpus_of(home, finished)
    left = marked(f"LOADPEAK_OUTPUTS={folder}/")
    if left:
        raise CommandError(
            f"process {pids(left)} is left of a startup that was broken off; end it, then go on with "
            f"`loadpeak ab --resume {shlex.quote(experiment.experiment)}`"
        )
    with Interrupts() as interrupts, progress:
        for pair, arm in order(experiment):
            if (pair, arm.name) in done:
                continue
            progress.begin(pair, arm.name, finished)
            with interrupts.raised():
                note = emptiness.wait(gpus, lambda text: progress.say(f"waiting for the GPUs: {text}"))
            if note is not None:
                progress.say(f"going on all the same: {note}")
            attempt = Attempt(
                experiment,
                arm,
                pair,
                environ=environ,
                home=home,
                log=folder / f"{pair + 1}-{arm.name}.log",
                limits=limits,
            )
            startup = msgspec.structs.replace(attempt.run(progress.watch, interrupts), note=note)
            store.append_startup(folder, startup)
            finished.append(startup)
            gpus |= _gpus_of(home, [startup])
            if startup.error is not None:
                progress.say(f"pair {pair + 1} · {arm.name} failed: {startup.error}")
    return finished


def _gpus_of(home: Path, startups: list[Startup]) -> set[str]:
    """The GPUs that these startups used, as far as they were recorded."""
    runs = RunStore(home)
    records = [store.evidence(runs, startup).run for startup in startups]
    return {
        rank.device.uuid
        for record in records
        if record is not None
        for rank in record.ranks
        if rank.device is not None and rank.device.uuid is not None
    }
