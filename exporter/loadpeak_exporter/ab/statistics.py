"""The repeats of each arm: minimum, median and maximum, and what may be said about loading times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import comb
from statistics import median

import msgspec

from loadpeak_exporter.ab.growth import Distance, Place, distance, place
from loadpeak_exporter.ab.records import Evidence, Experiment
from loadpeak_exporter.ab.trial import not_ready
from loadpeak_exporter.fold import highest, total
from loadpeak_exporter.records import RankRecord, RunRecord

FEWEST = 4
"""So many repeats of each arm are needed to say that times differ: with 4 and 4, ranges that do not overlap
come about by chance once in 35 times, with 3 and 3 once in 10."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of one figure in several startups."""

    count: int
    minimum: float
    median: float
    maximum: float


def spread(values: Sequence[float | None]) -> Spread | None:
    """The spread of the values that are there; nothing without any."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(count=len(there), minimum=min(there), median=median(there), maximum=max(there))


class ArmStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. Memory figures are those of the worst rank, in bytes; retries are those of all ranks."""

    arm: str
    startups: int
    ready: int
    memory: dict[str, Spread | None]
    times: dict[str, Spread | None]
    """Seconds, of the slowest rank."""
    claims: dict[str, str]
    """What may be said of the times beside the baseline's."""
    distance: Distance | None
    """Of the startup and rank that is furthest from the lowest possible peak."""
    place: Place | None
    """Where that rank's peak lies."""


def _worst(field: str) -> Callable[[RunRecord], int | None]:
    return lambda run: highest(*(getattr(rank, field) for rank in run.ranks))


MEMORY: dict[str, Callable[[RunRecord], int | None]] = {
    "load peak": _worst("load_peak_bytes"),
    "device peak": _worst("device_used_peak_bytes"),
    "reserved peak": _worst("reserved_peak_bytes"),
    "ready allocated": _worst("ready_allocated_bytes"),
    "retries": lambda run: total(*(rank.retries for rank in run.ranks)),
}


def _slowest(phase: str) -> Callable[[Evidence], float | None]:
    def read(evidence: Evidence) -> float | None:
        ranks = evidence.run.ranks if evidence.run is not None else ()
        durations = [
            found.duration_seconds for rank in ranks for found in rank.phases if found.phase == phase
        ]
        return max((duration for duration in durations if duration is not None), default=None)

    return read


TIMES: dict[str, Callable[[Evidence], float | None]] = {
    "until ready": lambda evidence: evidence.startup.ready_after_seconds,
    "load weights": _slowest("load_weights"),
    "process weights": _slowest("process_weights"),
}


def statistics(experiment: Experiment, evidence: Sequence[Evidence]) -> tuple[ArmStatistics, ...]:
    """Every arm's figures. Those of memory are of all startups, as far as they came; times of ready ones."""
    of_arm = {
        arm.name: [item for item in evidence if item.startup.arm == arm.name] for arm in experiment.arms
    }
    baseline = _times(of_arm[experiment.arms[0].name])
    return tuple(_arm(name, found, baseline) for name, found in of_arm.items())


def _arm(name: str, found: Sequence[Evidence], baseline: Mapping[str, Sequence[float]]) -> ArmStatistics:
    runs = [item.run for item in found if item.run is not None]
    times = _times(found)
    rank = furthest([rank for run in runs for rank in run.ranks])
    return ArmStatistics(
        arm=name,
        startups=len(found),
        ready=sum(not_ready(item) is None for item in found),
        memory={figure: spread([read(run) for run in runs]) for figure, read in MEMORY.items()},
        times={figure: spread(values) for figure, values in times.items()},
        claims={figure: claim(baseline[figure], values) for figure, values in times.items()},
        distance=None if rank is None else distance(rank),
        place=None if rank is None else place(rank),
    )


def furthest(ranks: Sequence[RankRecord]) -> RankRecord | None:
    """The rank that is furthest from its lowest possible peak; where none is known, that with the highest."""

    def key(rank: RankRecord) -> tuple[float, int]:
        found = distance(rank)
        return (0.0 if found is None else found.ratio, rank.load_peak_bytes or 0)

    return max(ranks, key=key, default=None)


def _times(found: Sequence[Evidence]) -> dict[str, list[float]]:
    ready = [item for item in found if not_ready(item) is None]
    return {
        figure: [value for item in ready if (value := read(item)) is not None]
        for figure, read in TIMES.items()
    }


def claim(baseline: Sequence[float], fix: Sequence[float]) -> str:
    """What the repeats support: a difference only where the ranges do not overlap and there are enough."""
    if not baseline or not fix:
        return "no times"
    if 1 in (len(baseline), len(fix)):
        return "a single repeat supports no claim"
    if min(fix) <= max(baseline) and min(baseline) <= max(fix):
        return "the ranges overlap: no difference shown"
    if min(len(baseline), len(fix)) < FEWEST:
        chance = comb(len(baseline) + len(fix), len(fix)) // 2
        return f"too few repeats for a claim: chance alone does this 1 time in {chance}"
    return (
        "faster: the ranges do not overlap"
        if max(fix) < min(baseline)
        else "slower: the ranges do not overlap"
    )
