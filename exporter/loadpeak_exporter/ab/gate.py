"""The gate: every rule's verdict on every arm, and whether all of them passed.

A rule passes an arm if it passed in all pairs, and fails if it failed in any. Otherwise it was *not judged*
(``passed`` is null): something that it needs was not there. The gate passes only if every rule was judged
and passed: what could not be shown was not shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadpeak_exporter.ab.records import Evidence, Experiment
from loadpeak_exporter.ab.rules import RULES, Rule
from loadpeak_exporter.ab.trial import Finding, Trial, not_ready, trials
from loadpeak_exporter.compare import Comparison, compare


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the verdict."""


class Side(_Struct, frozen=True):
    """One startup of a pair."""

    arm: str
    run: str | None
    ready_after_seconds: float | None
    error: str | None
    """Why it did not become ready."""


class Pair(_Struct, frozen=True):
    """An arm's startup beside the baseline's. The comparison is missing where either left no record."""

    pair: int
    baseline: Side
    fix: Side
    comparison: Comparison | None


class Entry(_Struct, frozen=True):
    """One rule's verdict on one arm; ``passed`` is missing where it could not be judged."""

    rule: str
    passed: bool | None
    detail: str
    arm: str | msgspec.UnsetType = msgspec.UNSET
    """Left out where only one arm is judged."""


class Verdict(_Struct, frozen=True):
    """What the report's JSON holds."""

    pairs: tuple[Pair, ...]
    gate: tuple[Entry, ...]
    passed: bool


def judge(experiment: Experiment, evidence: Sequence[Evidence]) -> Verdict:
    """Judge every arm against the first."""
    found = tuple(trials(experiment, evidence))
    fixes = [arm.name for arm in experiment.arms[1:]]
    gate = tuple(
        _entry(
            rule,
            [trial for trial in found if trial.arm.name == name],
            name if len(fixes) > 1 else msgspec.UNSET,
        )
        for name in fixes
        for rule in RULES
    )
    pairs = tuple(map(_pair, found))
    return Verdict(pairs=pairs, gate=gate, passed=bool(pairs) and all(entry.passed for entry in gate))


def exit_status(verdict: Verdict) -> int:
    """Of the command: 0 if every rule passed, else 1."""
    return 0 if verdict.passed else 1


def _entry(rule: Rule, found: Sequence[Trial], arm: str | msgspec.UnsetType) -> Entry:
    findings = [(trial.pair, _find(rule, trial)) for trial in found]
    verdicts = {finding.passed for _, finding in findings}
    passed = False if False in verdicts else None if None in verdicts or not verdicts else True
    return Entry(rule=rule.name, passed=passed, detail=_detail(findings), arm=arm)


def _find(rule: Rule, trial: Trial) -> Finding:
    if rule.needs_ready:
        down = [name for name, side in trial.sides if not_ready(side) is not None]
        if down:
            return Finding(None, f"not judged: {' and '.join(down)} did not become ready")
    return rule.judge(trial)


def _detail(findings: Sequence[tuple[int, Finding]]) -> str:
    """What was found, once where all pairs say the same."""
    pairs_of: dict[str, list[str]] = {}
    for pair, finding in findings:
        pairs_of.setdefault(finding.detail, []).append(str(pair))
    if len(pairs_of) == 1:
        return next(iter(pairs_of))
    return "; ".join(
        f"{'pair' if len(pairs) == 1 else 'pairs'} {', '.join(pairs)}: {detail}"
        for detail, pairs in pairs_of.items()
    )


def _pair(trial: Trial) -> Pair:
    before, after = trial.baseline.run, trial.fix.run
    return Pair(
        pair=trial.pair,
        baseline=_side(trial.baseline),
        fix=_side(trial.fix),
        comparison=None if before is None or after is None else compare(before, after),
    )


def _side(evidence: Evidence) -> Side:
    startup = evidence.startup
    return Side(
        arm=startup.arm,
        run=startup.run,
        ready_after_seconds=startup.ready_after_seconds,
        error=not_ready(evidence),
    )
