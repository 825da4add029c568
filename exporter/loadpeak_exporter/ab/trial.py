"""One startup of an arm beside the baseline's of the same pair, and what a rule found in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadpeak_exporter.ab.records import Arm, Evidence, Experiment, Startup


class Finding(NamedTuple):
    """What a rule says.

    Attributes:
        passed: missing where the rule could not be judged.
        detail: the figures, or why it could not.
    """

    passed: bool | None
    detail: str


class Trial(NamedTuple):
    """What the rules judge. Pairs are counted from one, as in all reports."""

    pair: int
    baseline_arm: Arm
    arm: Arm
    baseline: Evidence
    fix: Evidence

    @property
    def sides(self) -> tuple[tuple[str, Evidence], tuple[str, Evidence]]:
        """Both startups with the names of their arms."""
        return (self.baseline_arm.name, self.baseline), (self.arm.name, self.fix)


def trials(experiment: Experiment, evidence: Sequence[Evidence]) -> Iterator[Trial]:
    """Every arm but the first, in every pair that was planned."""
    known = {(item.startup.pair, item.startup.arm): item for item in evidence}
    baseline, *fixes = experiment.arms
    for arm in fixes:
        for pair in range(experiment.pairs):
            sides = [known.get((pair, name)) or _missing(pair, name) for name in (baseline.name, arm.name)]
            yield Trial(pair + 1, baseline, arm, *sides)


def _missing(pair: int, arm: str) -> Evidence:
    return Evidence(
        startup=Startup(pair=pair, arm=arm, began_at_wall_seconds=0.0, error="it was never started")
    )


def not_ready(evidence: Evidence) -> str | None:
    """Why a startup did not become ready, in one line; nothing if it did."""
    if evidence.startup.error is not None:
        return evidence.startup.error
    run = evidence.run
    if run is None or run.outcome == "ready":
        return None
    reasons = [rank.failure.reason for rank in run.ranks if rank.failure is not None]
    return f"{run.outcome}: {reasons[0]}" if reasons else run.outcome
