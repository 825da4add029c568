"""The report of an experiment: its gate, its peaks in the shape of the reference table, its statistics."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence

from loadpeak_exporter.ab.gate import Entry, Pair, Verdict, judge
from loadpeak_exporter.ab.growth import LIMIT_RATIO
from loadpeak_exporter.ab.records import Evidence, Experiment
from loadpeak_exporter.ab.rules import RULES
from loadpeak_exporter.ab.statistics import FEWEST, MEMORY, TIMES, ArmStatistics, Spread, statistics
from loadpeak_exporter.ab.trial import not_ready
from loadpeak_exporter.fold import highest
from loadpeak_exporter.reports.document import Drawn, Report, Section, table
from loadpeak_exporter.reports.facts import draw, environment
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import ABSENT, mib, mib_range, notes, plural

VERDICTS = {True: "passed", False: "failed", None: "not judged"}


def build(experiment: Experiment, evidence: Sequence[Evidence], store: RunStore) -> Report:
    """The report of an experiment, with everything in it that is known; nothing is redacted."""
    verdict = judge(experiment, evidence)
    figures = statistics(experiment, evidence)
    sections = (
        _peaks(experiment, evidence, verdict),
        _gate(verdict),
        _memory(figures),
        _places(figures),
        _times(figures),
        _startups(evidence),
        _environment(experiment, evidence),
        _arms(experiment),
    )
    return Report(
        title=f"loadpeak A/B: {experiment.experiment}",
        summary=_summary(verdict),
        passed=verdict.passed,
        sections=sections,
        drawn=tuple(_drawn(experiment, evidence, store)),
        verdict=verdict,
    )


def _summary(verdict: Verdict) -> str:
    counts = dict.fromkeys(VERDICTS.values(), 0)
    for entry in verdict.gate:
        counts[VERDICTS[entry.passed]] += 1
    parts = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "nothing was judged"
    return f"The gate {'passed' if verdict.passed else 'did not pass'}: {parts}."


def _peaks(experiment: Experiment, evidence: Sequence[Evidence], verdict: Verdict) -> Section:
    """A row for each pair, as in the reference table."""
    modes = {(item.startup.pair + 1, item.startup.arm): _mode(item) for item in evidence}
    several = len(experiment.arms) > 2
    rows = []
    for pair in verdict.pairs:
        form, mode = modes.get((pair.pair, pair.fix.arm), (ABSENT, ABSENT))
        names = [pair.fix.arm] if several else []
        peaks = [_peak_cell(pair, field) for field in ("load_peak_bytes", "device_peak_bytes")]
        rows.append([form, f"{mode} {pair.pair}", *names, *peaks, _ready_cell(pair)])
    columns = [
        "format",
        "mode",
        *(["fix"] if several else []),
        ">worst-GPU load peak, baseline → fix (MiB)",
        ">worst-GPU startup peak, baseline → fix (MiB)",
        ">ready live allocation per GPU (MiB)",
    ]
    devices = {rank.device.kind for item in evidence if item.run for rank in item.run.ranks if rank.device}
    resident = ("No GPU was read: device figures are the resident memory of the processes.",)
    text = (
        "Load peak: highest device use before the KV cache, which the gate judges. Startup peak: highest "
        "until ready; with vLLM's default settings the KV cache fills the device in every arm."
    )
    return Section(
        title="Peaks", table=table(columns, rows), after=(text, *(resident if "resident" in devices else ()))
    )


def _mode(evidence: Evidence) -> tuple[str, str]:
    """Format and mode of a startup."""
    settings = evidence.settings or {}
    dtype = settings.get("model_config.dtype", ABSENT).removeprefix("torch.")
    quantization = evidence.run.header.quantization if evidence.run is not None else None
    modes = {"True": "eager", "False": "graph"}
    return quantization or dtype, modes.get(settings.get("model_config.enforce_eager", ""), ABSENT)


def _peak_cell(pair: Pair, field: str) -> str:
    """The worst rank's peak on both sides; one that did not become ready says so."""
    ranks = pair.comparison.ranks if pair.comparison is not None else ()
    cells = []
    for name, side in (("baseline", pair.baseline), ("fix", pair.fix)):
        sides = [found for rank in ranks if (found := getattr(rank, name)) is not None]
        peak = highest(*(getattr(found, field) for found in sides))
        cells.append(mib(peak) + (" (not ready)" if side.error else ""))
    return " → ".join(cells)


def _ready_cell(pair: Pair) -> str:
    """What every GPU holds when ready: one figure where nothing differs."""
    ranks = pair.comparison.ranks if pair.comparison is not None else ()
    cells = []
    for side in ("baseline", "fix"):
        sides = [found for rank in ranks if (found := getattr(rank, side)) is not None]
        values = [found.ready_allocated_bytes for found in sides]
        cells.append(ABSENT if None in values or not values else mib_range(values, 3))
    before, after = cells
    return before if before == after else f"{before} → {after}"


def said(entry: Entry) -> str:
    """An entry's detail beside its verdict."""
    return entry.detail.removeprefix(f"{VERDICTS[None]}: ")


def _gate(verdict: Verdict) -> Section:
    meanings = {rule.name: rule.meaning for rule in RULES}
    several = any(entry.arm for entry in verdict.gate)
    rows = [
        [*([str(entry.arm)] if several else []), meanings[entry.rule], VERDICTS[entry.passed], said(entry)]
        for entry in verdict.gate
    ]
    text = ["What could not be judged was not shown, so the gate does not pass."]
    return Section(
        title="Gate",
        table=table([*(["arm"] if several else []), "rule", "verdict", "figures"], rows),
        after=tuple(text if any(entry.passed is None for entry in verdict.gate) else ()),
    )


def _spread(found: Spread | None, show: Callable[[float], str]) -> str:
    """Minimum, median and maximum; one figure where they are the same."""
    if found is None:
        return ABSENT
    cells = [show(value) for value in (found.minimum, found.median, found.maximum)]
    return cells[0] if len(set(cells)) == 1 else " · ".join(cells)


def _memory(figures: Sequence[ArmStatistics]) -> Section:
    shows: dict[str, Callable[[float], str]] = dict.fromkeys(MEMORY, mib) | {
        "ready allocated": lambda value: mib(value, 3),
        "retries": "{:g}".format,
    }
    rows = [
        [arm.arm, str(arm.startups), *(_spread(arm.memory[name], shows[name]) for name in MEMORY)]
        for arm in figures
    ]
    return Section(
        title="Memory of the repeats",
        table=table(["arm", ">startups", *(f">{name}" for name in MEMORY)], rows),
        after=(
            "MiB, worst rank: minimum · median · maximum. Load peak: device use before the KV cache; device "
            "peak: of the whole startup.",
        ),
    )


def _places(figures: Sequence[ArmStatistics]) -> Section:
    rows = []
    for arm in figures:
        far, where = arm.distance, arm.place
        cells = (
            [ABSENT] * 3
            if far is None
            else [mib(far.load_peak_bytes), mib(far.lowest_bytes), f"{far.ratio:.2f}"]
        )
        place = [ABSENT, ""] if where is None else [where.kind, where.sentence]
        rows.append([arm.arm, *cells, *place])
    columns = ["arm", ">load peak", ">lowest possible", ">ratio", "peak lies", "in words"]
    return Section(
        title="Where the peak lies",
        table=table(columns, rows),
        after=(
            "Lowest possible: highest live allocation plus what is in use outside the allocator, MiB. "
            f"A fixed startup should have a ratio of {LIMIT_RATIO:.2f} at most. Each row is the startup and "
            "rank that is furthest from it.",
        ),
    )


def _times(figures: Sequence[ArmStatistics]) -> Section:
    rows = []
    for place, arm in enumerate(figures):
        for name in TIMES:
            found = arm.times[name]
            if found is not None:
                said = "" if place == 0 else arm.claims[name]
                rows.append([arm.arm, name, str(found.count), _spread(found, "{:.1f}".format), said])
    return Section(
        title="Loading times",
        text=(
            "Kept apart from the memory results. A difference is claimed only where the ranges of "
            f"{FEWEST} or more repeats of each arm do not overlap.",
        ),
        table=table(["arm", "time", ">repeats", ">seconds", "beside the baseline"], rows),
    )


def _startups(evidence: Sequence[Evidence]) -> Section:
    rows = []
    for item in evidence:
        startup, run = item.startup, item.run
        reason = not_ready(item)
        remarks = [*([reason] if reason else []), *([startup.note] if startup.note else [])]
        remarks += notes(run) if run is not None and not reason else []
        outcome = "ready" if reason is None else "failed" if run is None else run.outcome
        rows.append([str(startup.pair + 1), startup.arm, startup.run or ABSENT, outcome, "; ".join(remarks)])
    return Section(title="Startups", table=table(["pair", "arm", "run", "outcome", "notes"], rows))


def _environment(experiment: Experiment, evidence: Sequence[Evidence]) -> Section:
    runs = [item.run for item in evidence if item.run is not None]
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(experiment.created_at_wall_seconds))
    rows = [["date", created], ["host", experiment.hostname], *environment(runs)]
    if experiment.prompts:
        rows.append(
            ["prompts", f"{len(experiment.prompts)}, at most {experiment.max_tokens} tokens each, greedy"]
        )
    return Section(title="Environment", table=table(["", ""], rows))


def _arms(experiment: Experiment) -> Section:
    rows = [
        [
            arm.name,
            arm.release,
            arm.split_limit,
            arm.alloc_conf or "as it is",
            shlex.join(arm.arguments) or ABSENT,
            arm.environment or "this one",
        ]
        for arm in experiment.arms
    ]
    columns = ["arm", "release", "split limit", "allocator setting", "added flags", "environment"]
    return Section(
        title="How it was run",
        text=(
            f"{plural(experiment.pairs, 'round')} of all arms, every other round backwards, one startup at a "
            "time, each in a fresh process:",
        ),
        code=shlex.join(experiment.command),
        table=table(columns, rows),
    )


def _drawn(experiment: Experiment, evidence: Sequence[Evidence], store: RunStore) -> Iterator[Drawn]:
    """The worst rank of each arm's first startup that was recorded."""
    for arm in experiment.arms:
        runs = [item.run for item in evidence if item.startup.arm == arm.name and item.run is not None]
        if runs and runs[0].ranks:
            yield draw(arm.name, runs[0], store)
