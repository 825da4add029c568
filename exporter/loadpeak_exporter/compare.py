"""Two runs side by side: a baseline and what is meant to be its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from loadpeak.record import Outcome
from loadpeak_exporter.fold import highest, total
from loadpeak_exporter.records import RankRecord, RunRecord


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a comparison: the worst rank where ranks differ, ``None`` where there is no reading.

    ``ready_allocated_bytes`` is that of the rank with most; ranks are compared one by one in
    :attr:`Comparison.ranks`.
    """

    run: str
    variant: str
    outcome: Outcome
    worst_device_peak_bytes: int | None
    worst_reserved_peak_bytes: int | None
    allocated_peak_bytes: int | None
    ready_allocated_bytes: int | None
    allocator_retries: int | None
    alloc_conf: str | None
    layers: int | None


class RankSide(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one run."""

    outcome: Outcome
    load_peak_bytes: int | None
    device_peak_bytes: int | None
    reserved_peak_bytes: int | None
    allocated_peak_bytes: int | None
    ready_allocated_bytes: int | None
    allocator_retries: int | None
    headroom_bytes: int | None


class RankPair(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in both runs; a side is missing where that run had no such rank."""

    rank: int
    baseline: RankSide | None
    fix: RankSide | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Baseline and fix. The reduction is that of the worst device peak, missing if either side lacks it.

    Device peaks are those of whole startups. With vLLM's default settings the KV cache fills the device of
    every run to the same height; then only the load peaks, those before it, tell runs apart.
    """

    baseline: Side
    fix: Side
    peak_reduction_bytes: int | None
    ready_allocated_equal: bool | None
    ranks: tuple[RankPair, ...]

    @property
    def worst_load_peaks(self) -> tuple[int | None, int | None]:
        """Highest device use before the KV cache, of the baseline and of the fix."""
        before = highest(*(pair.baseline.load_peak_bytes for pair in self.ranks if pair.baseline))
        return before, highest(*(pair.fix.load_peak_bytes for pair in self.ranks if pair.fix))

    @property
    def load_peak_reduction_bytes(self) -> int | None:
        """How much lower the fix's worst load peak is."""
        return _less(*self.worst_load_peaks)


def compare(baseline: RunRecord, fix: RunRecord) -> Comparison:
    """Compare two runs."""
    before, after = _side(baseline), _side(fix)
    numbers = sorted({rank.rank for run in (baseline, fix) for rank in run.ranks})
    pairs = tuple(
        RankPair(rank=number, baseline=_rank(baseline, number), fix=_rank(fix, number)) for number in numbers
    )
    return Comparison(
        baseline=before,
        fix=after,
        peak_reduction_bytes=_less(before.worst_device_peak_bytes, after.worst_device_peak_bytes),
        ready_allocated_equal=_ready_equal(pairs),
        ranks=pairs,
    )


def _less(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after


def _side(run: RunRecord) -> Side:
    def worst(read: Callable[[RankRecord], int | None]) -> int | None:
        return highest(*map(read, run.ranks))

    return Side(
        run=run.run,
        variant=run.header.variant,
        outcome=run.outcome,
        worst_device_peak_bytes=worst(lambda rank: rank.device_used_peak_bytes),
        worst_reserved_peak_bytes=worst(lambda rank: rank.reserved_peak_bytes),
        allocated_peak_bytes=worst(lambda rank: rank.allocated_peak_bytes),
        ready_allocated_bytes=worst(lambda rank: rank.ready_allocated_bytes),
        allocator_retries=total(*(rank.retries for rank in run.ranks)),
        alloc_conf=run.header.alloc_conf,
        layers=worst(lambda rank: rank.layers_expected),
    )


def _rank(run: RunRecord, number: int) -> RankSide | None:
    for rank in run.ranks:
        if rank.rank == number:
            return RankSide(
                outcome=rank.outcome,
                load_peak_bytes=rank.load_peak_bytes,
                device_peak_bytes=rank.device_used_peak_bytes,
                reserved_peak_bytes=rank.reserved_peak_bytes,
                allocated_peak_bytes=rank.allocated_peak_bytes,
                ready_allocated_bytes=rank.ready_allocated_bytes,
                allocator_retries=rank.retries,
                headroom_bytes=rank.headroom_bytes,
            )
    return None


def _ready_equal(pairs: Iterable[RankPair]) -> bool | None:
    """Whether every rank has the same live allocation when ready, to the byte."""
    values = [
        (pair.baseline and pair.baseline.ready_allocated_bytes, pair.fix and pair.fix.ready_allocated_bytes)
        for pair in pairs
    ]
    if not values or any(value is None for both in values for value in both):
        return None
    return all(before == after for before, after in values)
