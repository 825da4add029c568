"""``loadpeak ab``."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from loadpeak import settings
from loadpeak.errors import CommandError
from loadpeak_exporter.ab import plan, runner, store
from loadpeak_exporter.ab.completions import says_server
from loadpeak_exporter.ab.gate import exit_status, judge
from loadpeak_exporter.ab.gate_text import print_gate
from loadpeak_exporter.ab.gpus import Emptiness, NvmlGpus
from loadpeak_exporter.ab.progress import Progress
from loadpeak_exporter.ab.records import FORMAT, MOST_PAIRS, Evidence, Experiment
from loadpeak_exporter.ab.startup import Limits
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.text import ABSENT, mib, outcome_text, table

INTERRUPTED = 130


def ab(
    context: typer.Context,
    command: list[str] | None = typer.Argument(
        None,
        help="The command that starts vLLM, after `--`: a server of the OpenAI API, or a script with an LLM.",
        metavar="-- COMMAND",
    ),
    pairs: int = typer.Option(2, min=1, max=MOST_PAIRS, help="Rounds; each starts every arm once."),
    arm: list[str] = typer.Option(
        [],
        metavar="NAME:SETTING",
        help="An arm: NAME and what it changes, one of release=POLICY, split-limit=keep, alloc-conf=CONF, "
        "flag=FLAG (added to the command), environment=FOLDER (another Python environment and its vLLM). "
        "Repeat it for more arms, and with the same NAME for more settings. "
        "Left out: fix:release=moe-layer. The arm `baseline` changes nothing unless it is given.",
    ),
    experiment: str = typer.Option("", help="Name of the experiment; called again with it, it is continued."),
    resume: str = typer.Option("", metavar="NAME", help="Continue an experiment, with the plan it has."),
    prompts: Path | None = typer.Option(
        None, help="A file with one prompt a line; in a .jsonl file JSON strings or lists of token ids."
    ),
    max_tokens: int = typer.Option(128, min=1, help="The most tokens for one prompt."),
    ready_timeout: float = typer.Option(3600, min=1, help="Seconds for an engine to be ready."),
    timeout: float = typer.Option(
        600, min=1, help="Seconds for one answer, and for a script to end once its engine is ready."
    ),
    gpu_timeout: float = typer.Option(
        300, min=0, help="Seconds to wait for GPUs that others still use before the next startup."
    ),
) -> None:
    """Start a command several times in two or more arms, in turn, and compare what becomes of it.

    Every startup is recorded. The prompts are sent greedily; a script sends its own.
    """
    home = settings.load().home
    if resume:
        _nothing_else(context)
        planned = _resumed(home, resume, command)
    else:
        planned = _planned(command or [], pairs, arm, experiment, prompts, max_tokens)
    for each in planned.arms:
        plan.arm_command(each, planned.command)
    folder = store.experiment_folder(home, planned.experiment)
    quoted = shlex.quote(planned.experiment)
    console = Console(stderr=True)
    try:
        with store.alone(folder):
            runner.prepare(home, planned)
            runner.run(
                home,
                planned,
                environ=dict(os.environ),
                limits=Limits(ready_timeout, timeout),
                emptiness=Emptiness(NvmlGpus(), gpu_timeout),
                progress=Progress(console, planned),
            )
    except KeyboardInterrupt:
        done, total = len(store.read_startups(folder)), planned.pairs * len(planned.arms)
        console.print(
            f"loadpeak: stopped after {done} of {total} startups; `loadpeak ab --resume {quoted}` goes on",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    _, evidence = store.read_experiment(home, planned.experiment)
    verdict = judge(planned, evidence)
    print_startups(Console(), planned, evidence)
    print_gate(Console(), verdict)
    print(f"\nloadpeak report {quoted} tells more")
    raise typer.Exit(exit_status(verdict))


def _planned(
    command: list[str], pairs: int, arms: Sequence[str], name: str, prompts: Path | None, max_tokens: int
) -> Experiment:
    """The plan in the options.

    Raises:
        CommandError: it cannot be run.
        SettingError: a setting of an arm cannot be used.
    """
    if not command:
        raise CommandError("there is no command: expected `loadpeak ab … -- vllm serve MODEL …`")
    for word in (*command, *arms):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise CommandError(f"{word!r} is no UTF-8, and the plan of an experiment is kept in it") from None
    if prompts is not None:
        chosen = plan.read_prompts(prompts)
    else:
        chosen = plan.default_prompts(command) if says_server(command) else ()
    now = time.time()
    return Experiment(
        format=FORMAT,
        experiment=name or time.strftime("ab-%Y%m%dT%H%M%S", time.gmtime(now)),
        created_at_wall_seconds=now,
        hostname=platform.node(),
        command=tuple(command),
        arms=plan.parse_arms(arms),
        pairs=pairs,
        prompts=chosen,
        max_tokens=max_tokens,
    )


def _nothing_else(context: typer.Context) -> None:
    """Refuse what would change a plan that there is.

    Raises:
        CommandError: an option of the plan was given.
    """
    for name in ("pairs", "arm", "experiment", "prompts", "max_tokens"):
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = "--" + name.replace("_", "-")
            raise CommandError(
                f"--resume goes on with the plan that the experiment has, so {option} cannot be given; "
                "leave it out, or give a new experiment a name"
            )


def _resumed(home: Path, name: str, command: list[str] | None) -> Experiment:
    """The plan of an experiment that was begun before.

    Raises:
        CommandError: there is none, or it has another command.
    """
    planned = store.read_plan(store.experiment_folder(home, name))
    if command and tuple(command) != planned.command:
        raise CommandError(
            f"experiment {name} runs another command ({' '.join(planned.command)}); "
            "leave the command out, or give a new experiment a name"
        )
    return msgspec.structs.replace(planned, hostname=platform.node())


def print_startups(console: Console, experiment: Experiment, evidence: Sequence[Evidence]) -> None:
    """One row a startup: how it went, its peaks, when it was ready."""
    rows = table(">pair", "arm", "outcome", ">load peak\nMiB", ">device peak\nMiB", ">ready\ns", "run")
    for found in evidence:
        startup, run = found.startup, found.run
        ready = startup.ready_after_seconds
        rows.add_row(
            str(startup.pair + 1),
            escape(startup.arm),
            outcome_text(run.outcome if run else "not recorded"),
            mib(_highest(run, "load_peak_bytes")),
            mib(_highest(run, "device_used_peak_bytes")),
            ABSENT if ready is None else f"{ready:.1f}",
            escape(startup.run or ABSENT),
        )
    console.print(f"\n[bold]experiment {escape(experiment.experiment)}[/]")
    console.print(rows)
    for found in evidence:
        for text in (found.startup.error, found.startup.note):
            if text is not None:
                place = f"pair {found.startup.pair + 1} · {found.startup.arm}"
                console.print(f"{place}: {text}", style="yellow", markup=False, soft_wrap=True)


def _highest(run: RunRecord | None, field: str) -> int | None:
    values = [getattr(rank, field) for rank in run.ranks] if run else []
    return max((value for value in values if value is not None), default=None)
