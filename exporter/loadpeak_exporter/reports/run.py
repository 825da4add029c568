"""The report of a single run: its peaks by rank, phase and layer, where they lie, and why it failed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loadpeak_exporter.ab.growth import LIMIT_RATIO, distance, place
from loadpeak_exporter.ab.statistics import furthest
from loadpeak_exporter.records import LayerRecord, RankRecord, RunRecord
from loadpeak_exporter.reports.document import Report, Section, table
from loadpeak_exporter.reports.facts import draw, environment
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import ABSENT, mib, notes, plural

_LAYERS = 10
"""So many layers are listed, those with the highest peaks."""


def build(run: RunRecord, store: RunStore) -> Report:
    """The report of a run; nothing is redacted."""
    worst = furthest(run.ranks)
    sections = [*_failures(run), _ranks(run)]
    if worst is not None:
        sections += [_place(worst), _phases(worst), *_layers(worst)]
    remarks = notes(run)
    if remarks:
        sections.append(Section(title="Notes", text=tuple(remarks)))
    return Report(
        title=f"loadpeak run {run.run}",
        summary=_summary(run),
        passed=None,
        sections=(*sections, _environment(run)),
        drawn=(draw(run.header.variant, run, store),) if run.ranks else (),
        run=run,
    )


def _summary(run: RunRecord) -> str:
    peaks = [rank.load_peak_bytes for rank in run.ranks if rank.load_peak_bytes is not None]
    peak = f", load peak {mib(max(peaks))} MiB" if peaks else ""
    return f"{run.header.variant}: {run.outcome}{peak}, {plural(len(run.ranks), 'rank')}."


def _failures(run: RunRecord) -> list[Section]:
    return [
        Section(
            title=f"Failure of rank {rank.rank}",
            text=(f"{failure.outcome} in {failure.phase or rank.phase}: {failure.reason}",),
            code=failure.message,
        )
        for rank in run.ranks
        if (failure := rank.failure) is not None
    ]


def _ranks(run: RunRecord) -> Section:
    rows = [
        [
            str(rank.rank),
            rank.outcome,
            mib(rank.load_peak_bytes),
            mib(rank.load_headroom_bytes),
            mib(rank.device_used_peak_bytes),
            mib(rank.reserved_peak_bytes),
            mib(rank.allocated_peak_bytes),
            mib(rank.ready_allocated_bytes, 3),
            ABSENT if rank.retries is None else str(rank.retries),
        ]
        for rank in run.ranks
    ]
    figures = (
        "load peak",
        "headroom",
        "device peak",
        "reserved peak",
        "live peak",
        "ready allocated",
        "retries",
    )
    return Section(
        title="Peaks",
        table=table([">rank", "outcome", *(f">{name}" for name in figures)], rows),
        after=("MiB. Load peak: highest device use before the KV cache; headroom: what was left then.",),
    )


def _place(rank: RankRecord) -> Section:
    where, far = place(rank), distance(rank)
    text = [f"Rank {rank.rank}, {where.kind}: {where.sentence}."]
    if far is not None:
        text.append(
            f"The load peak is {far.ratio:.2f} times the lowest possible, {mib(far.lowest_bytes)} MiB: the "
            f"highest live allocation ({mib(far.live_peak_bytes)}) plus what is in use outside the allocator "
            f"({mib(far.context_bytes)}). {LIMIT_RATIO:.2f} is what a fixed startup should reach."
        )
    return Section(title="Where the peak lies", text=tuple(text))


def _phases(rank: RankRecord) -> Section:
    rows = [
        [
            phase.phase,
            ABSENT if phase.duration_seconds is None else f"{phase.duration_seconds:.1f}",
            mib(phase.allocated_peak_bytes),
            mib(phase.reserved_peak_bytes),
            mib(phase.device_used_peak_bytes),
            phase.settings or ABSENT,
        ]
        for phase in rank.phases
    ]
    columns = ["phase", ">seconds", ">live peak", ">reserved peak", ">device peak", "allocator settings"]
    return Section(title=f"Phases of rank {rank.rank}", table=table(columns, rows))


def _layers(rank: RankRecord) -> list[Section]:
    if not rank.layers:
        return []

    def peak(layer: LayerRecord) -> int:
        return layer.reserved_peak_bytes or layer.device_peak_bytes or 0

    highest = sorted(rank.layers, key=peak, reverse=True)[:_LAYERS]
    columns = ["layer", "module", ">before", ">peak", ">after", ">live after", ">released", ">seconds"]
    return [
        Section(
            title=f"Layers of rank {rank.rank} with the highest peaks",
            table=table(columns, [_layer(layer) for layer in highest]),
            after=(f"Reserved memory, MiB; {len(highest)} of {plural(len(rank.layers), 'layer')}.",),
        )
    ]


def _layer(layer: LayerRecord) -> Sequence[str]:
    sizes = (
        layer.reserved_before_bytes,
        layer.reserved_peak_bytes,
        layer.reserved_bytes,
        layer.allocated_bytes,
        layer.released_bytes,
    )
    return [str(layer.layer), layer.name, *map(mib, sizes), f"{layer.duration_seconds:.2f}"]


def _environment(run: RunRecord) -> Section:
    header = run.header
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(header.created_at_wall_seconds))
    rows = [
        ["date", created],
        ["host", header.hostname],
        ["release", header.release],
        ["split limit", header.split_limit],
        *environment([run]),
    ]
    return Section(title="Environment", table=table(["", ""], rows))
