"""``loadpeak whatif``."""

import sys
from pathlib import Path

import typer
from rich.console import Console

from loadpeak import oom_explain, oom_message, run_folder, settings, snapshot
from loadpeak.errors import CommandError, SettingError
from loadpeak.settings import parse_size
from loadpeak.whatif import advice, chart, questions, text, why
from loadpeak.whatif.questions import Answer
from loadpeak.whatif.source import Source, build, read_timeline

_HISTORIES = "history-*.pickle*"
_LONGEST_LOG = 64 << 20
"""Bytes of a log in which an out-of-memory message is looked for."""


def whatif(
    recording: Path | None = typer.Argument(
        None,
        metavar="SNAPSHOT",
        help="A memory history of PyTorch (pickle, gzip or xz), or a run that has one: its folder, its id "
        "or `latest`.",
    ),
    alloc_conf: list[str] = typer.Option(
        [], help="Allocator setting to try, as in PYTORCH_CUDA_ALLOC_CONF; repeat it."
    ),
    release: list[str] = typer.Option(
        [], help="Release policy to try: off, moe-layer, layer or threshold:SIZE; repeat it."
    ),
    split_limit: list[str] = typer.Option(
        [], help="vllm (the program changes the split limit as recorded) or keep (it does not); repeat it."
    ),
    capacity: list[str] = typer.Option(
        [], help="What may be reserved, for example 32GiB; repeat it. Leave room for the CUDA context."
    ),
    timeline: Path | None = typer.Option(
        None, help="JSON file with settings that the program changed while it was recorded."
    ),
    chart_file: Path | None = typer.Option(None, "--chart", help="Write the chart to this HTML file."),
    read_limit: str = typer.Option("1GiB", help="Memory that reading the snapshot may take."),
    oom: str | None = typer.Option(
        None,
        metavar="FILE|-",
        help="Explain PyTorch's out-of-memory message in this file, or on standard input (-).",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; bytes, null for unknown."),
) -> None:
    """Predict the startup peak under other allocator settings, from one recorded run.

    Without a question, the settings that usually matter are tried. With --oom, an error's own text is read.
    """
    if (recording is None) == (oom is None):
        raise CommandError("give a memory history, or --oom and the text of an out-of-memory error")
    if oom is not None:
        _explain_message(oom, as_json)
        return
    assert recording is not None, "one of the two is given"
    if chart_file is not None and chart_file.suffix not in (".html", ".htm"):
        raise SettingError("--chart", str(chart_file), "a file that ends in .html: the chart is a page")
    recording = _history_of(recording)
    found = snapshot.read(recording, _size("--read-limit", read_limit))
    source = build(found, recording, None if timeline is None else read_timeline(timeline))
    sizes = sorted(_size("--capacity", value) for value in capacity)
    capacities: list[int | None] = [*sizes] or [source.limit_bytes]
    for value in split_limit:
        if value not in ("vllm", "keep"):
            raise SettingError("--split-limit", value, "vllm or keep")
    asked = questions.combinations(source, alloc_conf, release, split_limit, capacities)
    as_it_was = [questions.recorded(source, limit) for limit in (source.limit_bytes, capacities[0])]
    check, before, *answers = questions.ask(source, [*as_it_was, *asked])
    answers = questions.ranked(answers)
    sentence = text.disagreement(source, check) or advice.recommendation(answers, before)
    with_limits = any(question.keep_split_limit for question in asked)
    chosen = advice.best(answers, before.question)
    drawn = _chart(before, chosen)
    if as_json:
        print(text.to_json(answers, sentence, with_limits))
    else:
        console = Console()
        for note in text.notes(source, answers, bool(capacity)):
            console.print(f"note: {note}", style="yellow", markup=False)
        text.print_answers(console, answers)
        console.print(sentence, style="bold", markup=False)
        if drawn is not None:
            console.print()
            console.print(chart.to_text(drawn, console.width))
        text.print_why(console, _why(source, before), "the recorded settings")
    if chart_file is not None:
        _write_chart(chart_file, drawn, sentence)


def _write_chart(path: Path, drawn: chart.Chart | None, sentence: str) -> None:
    """Last, so that nothing is lost if it cannot be written."""
    if drawn is None:
        raise CommandError(f"{path} is not written: there are no layers to draw against")
    try:
        path.write_text(chart.to_html(drawn, sentence))
    except OSError as error:
        raise CommandError(f"the chart {path} cannot be written: {error.strerror}") from None


def _history_of(recording: Path) -> Path:
    """The file itself, or the history of a run: its folder, its id, or `latest`, the newest that has one."""
    runs = settings.load().home / run_folder.RUNS
    if str(recording) == "latest" and not recording.exists():
        with_history = sorted(path.parent for path in runs.glob(f"*/{_HISTORIES}"))
        recording = with_history[-1] if with_history else recording
    elif not recording.exists() and (runs / recording).is_dir():
        recording = runs / recording
    if not recording.is_dir():
        return recording
    found = sorted(recording.glob(_HISTORIES))
    if not found:
        raise CommandError(
            f"{recording} has no memory history; set LOADPEAK_MEMORY_HISTORY=1000000 and start the engine "
            "again (only a GPU's allocator has one)"
        )
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CommandError(f"{recording} holds {len(found)} histories ({names}); name the file of one rank")
    return found[0]


def _size(option: str, value: str) -> int:
    try:
        size = parse_size(value)
    except ValueError:
        size = 0
    if size <= 0:
        raise SettingError(option, value, "a size such as 32GiB")
    return size


def _chart(before: Answer, chosen: Answer) -> chart.Chart | None:
    """The recorded and the recommended settings, if there are layers to draw them against."""
    first, second = before.outcome.layers, chosen.outcome.layers
    if len(first) < 3:
        return None
    return chart.build(("recorded settings", chosen.name), first, second)


def _why(source: Source, answer: Answer) -> why.Why:
    run = next(run for run in source.devices if run.history.device == answer.device)
    scenario = answer.question.scenario(run.changes)
    return why.explain(run.history, scenario, run.boundaries, answer.outcome.peak_reserved_bytes)


def _explain_message(file: str, as_json: bool) -> None:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_LONGEST_LOG)
        else:
            with Path(file).open("rb") as log:
                data = log.read(_LONGEST_LOG)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error}") from None
    message = oom_message.read(data.decode(errors="replace"))
    print(oom_message.to_json(message) if as_json else oom_explain.explain(message))
