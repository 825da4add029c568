"""The rules of the gate: each judges one pair and says what it saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from loadpeak_exporter.ab.differences import other_mode, same_settings
from loadpeak_exporter.ab.records import Evidence, Output
from loadpeak_exporter.ab.trial import Finding, Trial, not_ready
from loadpeak_exporter.compare import RankPair, compare
from loadpeak_exporter.fold import highest, total
from loadpeak_exporter.text import mib, mib_range, plural

_NAMED = 3
"""So many examples stand in a detail."""


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: in the reports.
        meaning: what it asks for, in words.
        judge: looks at one pair.
        needs_ready: whether both startups must have become ready.
    """

    name: str
    meaning: str
    judge: Callable[[Trial], Finding]
    needs_ready: bool = True


def became_ready(trial: Trial) -> Finding:
    """Both startups became ready."""
    failed = [(name, reason) for name, side in trial.sides if (reason := not_ready(side)) is not None]
    if failed:
        return Finding(False, "; ".join(f"{name} did not become ready: {reason}" for name, reason in failed))
    return Finding(True, "both became ready")


def equal_weights(trial: Trial) -> Finding:
    """Every prepared tensor of every rank has the same hash."""
    if reason := other_mode(trial):
        return Finding(None, f"not judged: {reason}")
    lacking = [name for name, side in trial.sides if not side.weights or not any(side.weights.values())]
    if lacking:
        return Finding(None, f"not judged: no hashes were taken in {' and '.join(lacking)}")
    before, after = (_hashes(side) for _, side in trial.sides)
    bare = sorted(_ranks(trial) - {rank for rank, _ in before.keys() | after.keys()})
    if bare:
        return Finding(None, f"not judged: no hashes were taken on rank {_numbers(bare)}")
    faults = {
        "differ": sorted(key for key in before.keys() & after.keys() if before[key] != after[key]),
        f"are only in {trial.baseline_arm.name}": sorted(before.keys() - after.keys()),
        f"are only in {trial.arm.name}": sorted(after.keys() - before.keys()),
    }
    found = [f"{len(keys):,} {what}: {_tensors(keys)}" for what, keys in faults.items() if keys]
    if found:
        return Finding(False, f"of {plural(len(before.keys() | after.keys()), 'tensor')} " + "; ".join(found))
    ranks = len({rank for rank, _ in before})
    equal = f"{plural(len(before), 'tensor')} on {plural(ranks, 'rank')}, all equal"
    unread = [
        f"rank {rank} {name} of {arm} ({why})"
        for arm, side in trial.sides
        for rank, tensors in (side.not_hashed or {}).items()
        for name, why in tensors.items()
    ]
    if unread:
        return Finding(
            None, f"not judged: {len(unread):,} could not be hashed: {unread[0]}; {equal} otherwise"
        )
    return Finding(True, equal)


def _hashes(evidence: Evidence) -> dict[tuple[int, str], str]:
    weights = evidence.weights or {}
    return {(rank, name): digest for rank, tensors in weights.items() for name, digest in tensors.items()}


def _ranks(trial: Trial) -> set[int]:
    return {rank.rank for _, side in trial.sides if side.run is not None for rank in side.run.ranks}


def _tensors(keys: list[tuple[int, str]]) -> str:
    named = ", ".join(f"rank {rank} {name}" for rank, name in keys[:_NAMED])
    return named + (", …" if len(keys) > _NAMED else "")


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def equal_outputs(trial: Trial) -> Finding:
    """Every prompt has the same token ids and the same stop reason."""
    if reason := other_mode(trial):
        return Finding(None, f"not judged: {reason}")
    lacking = [name for name, side in trial.sides if not _tokens(side)]
    if lacking:
        return Finding(None, f"not judged: nothing was generated in {' and '.join(lacking)}")
    before, after = (_outputs(side) for _, side in trial.sides)
    faults: list[str] = []
    for prompt in sorted(before.keys() | after.keys()):
        fault = _unequal(before.get(prompt), after.get(prompt))
        if fault:
            faults.append(f"prompt {prompt} {fault}")
    count = plural(len(before), "prompt")
    if faults:
        more = "; …" if len(faults) > _NAMED else ""
        return Finding(False, f"{len(faults)} of {count}: " + "; ".join(faults[:_NAMED]) + more)
    natural = sum(output.stop_reason == "stop" for output in before.values())
    return Finding(
        True, f"{count}, {_tokens(trial.fix):,} tokens, all equal; {natural} came to a natural end"
    )


def _outputs(evidence: Evidence) -> Mapping[int, Output]:
    return {output.prompt: output for output in evidence.startup.outputs or ()}


def _tokens(evidence: Evidence) -> int:
    return sum(len(output.token_ids) for output in evidence.startup.outputs or ())


def _unequal(before: Output | None, after: Output | None) -> str | None:
    """How two answers to a prompt differ, if they do."""
    if before is None or after is None:
        return "was answered on one side only"
    if before.token_ids != after.token_ids:
        tokens = zip(before.token_ids, after.token_ids, strict=False)
        shorter = min(len(before.token_ids), len(after.token_ids))
        place = next((place for place, (one, other) in enumerate(tokens) if one != other), shorter)
        return f"differs from token {place} on"
    if before.stop_reason != after.stop_reason:
        return f"stopped for another reason ({before.stop_reason} → {after.stop_reason})"
    return None


def finite_logprobs(trial: Trial) -> Finding:
    """Every generated token has a finite log probability, on both sides."""
    counted = 0
    gaps = [f"nothing was generated in {name}" for name, side in trial.sides if not _tokens(side)]
    for name, side in trial.sides:
        for output in side.startup.outputs or ():
            if output.logprobs is None:
                gaps.append(f"prompt {output.prompt} of {name} has no log probabilities")
                continue
            finite = sum(value is not None and math.isfinite(value) for value in output.logprobs)
            if finite != len(output.token_ids):
                count = f"{finite} finite ones for {plural(len(output.token_ids), 'token')}"
                return Finding(False, f"prompt {output.prompt} of {name} has {count}")
            counted += finite
    if gaps:
        return Finding(None, f"not judged: {gaps[0]}")
    return Finding(True, f"{counted:,} of both arms, all finite")


def _rank_pairs(trial: Trial) -> tuple[RankPair, ...]:
    """Both sides of every rank; none where a side was not recorded."""
    if trial.baseline.run is None or trial.fix.run is None:
        return ()
    return compare(trial.baseline.run, trial.fix.run).ranks


def _both(pair: RankPair, field: str) -> tuple[int | None, int | None]:
    """A rank's figure in the baseline and in the fix."""
    before, after = (getattr(side, field) if side else None for side in (pair.baseline, pair.fix))
    return before, after


def equal_ready_allocation(trial: Trial) -> Finding:
    """Every rank holds the same when ready, to the byte."""
    if reason := other_mode(trial):
        return Finding(None, f"not judged: {reason}")
    pairs = _rank_pairs(trial)
    if not pairs:
        return Finding(None, "not judged: nothing was recorded")
    unequal: list[str] = []
    unread: list[int] = []
    values: list[int] = []
    for pair in pairs:
        before, after = _both(pair, "ready_allocated_bytes")
        if before is None or after is None:
            unread.append(pair.rank)
        elif before != after:
            unequal.append(f"rank {pair.rank} {before:,} → {after:,} bytes ({after - before:+,})")
        else:
            values.append(before)
    if unread and not unequal:
        return Finding(None, f"not judged: no reading of the allocator on rank {_numbers(unread)}")
    if unequal:
        hint = ""
        if trial.arm.alloc_conf != trial.baseline_arm.alloc_conf:
            hint = " (allocator settings round blocks differently)"
        return Finding(False, "; ".join(unequal) + hint)
    return Finding(True, f"{mib_range(values, 3)} MiB on {plural(len(pairs), 'rank')}, equal to the byte")


def lower_peak(trial: Trial) -> Finding:
    """The device's peak before the KV cache is lower on every GPU.

    With vLLM's default settings the KV cache fills every device to the same height, so the peak of the whole
    startup, which is shown too, cannot tell the arms apart.
    """
    pairs = _rank_pairs(trial)
    if not pairs:
        return Finding(None, "not judged: nothing was recorded")
    kinds = {
        rank.device and rank.device.kind for _, side in trial.sides if side.run for rank in side.run.ranks
    }
    figures = _peaks(pairs)
    if kinds != {"nvml"}:
        return Finding(None, f"not judged: no GPU was read; resident memory {figures}")
    higher: list[str] = []
    unread: list[int] = []
    for pair in pairs:
        before, after = _both(pair, "load_peak_bytes")
        if before is None or after is None:
            unread.append(pair.rank)
        elif after >= before:
            higher.append(f"rank {pair.rank} {mib(before)} → {mib(after)} MiB is not lower")
    if unread and not higher:
        return Finding(None, f"not judged: no reading of the device of rank {_numbers(unread)}")
    return Finding(not higher, "; ".join([*higher, f"worst GPU {figures}"]))


def _peaks(pairs: tuple[RankPair, ...]) -> str:
    """The worst peaks of both sides, before the KV cache and of the whole startup."""
    texts: list[str] = []
    for field, when in (("load_peak_bytes", "before the KV cache"), ("device_peak_bytes", "whole startup")):
        before, after = zip(*(_both(pair, field) for pair in pairs), strict=True)
        texts.append(f"{mib(highest(*before))} → {mib(highest(*after))} MiB {when}")
    return ", ".join(texts)


def no_retries(trial: Trial) -> Finding:
    """The fix's allocator never had to flush its cache and try again."""
    before, after = (
        None if side.run is None else [rank.retries for rank in side.run.ranks] for _, side in trial.sides
    )
    if not after or None in after:
        return Finding(None, "not judged: no reading of the allocator")
    counted = total(*after)
    return Finding(
        counted == 0, f"{counted} in {trial.arm.name}, {total(*before or ()) or 0} in the baseline"
    )


RULES: tuple[Rule, ...] = (
    Rule("ready", "Every startup became ready", became_ready, needs_ready=False),
    Rule("weights", "Prepared weight and scale tensors are equal by hash", equal_weights),
    Rule("outputs", "Token ids and stop reasons are equal for every prompt", equal_outputs),
    Rule("logprobs", "Every selected token has a finite log probability", finite_logprobs),
    Rule("ready-allocation", "Live allocation when ready is equal to the byte", equal_ready_allocation),
    Rule("device-peak", "The device's peak is lower on every GPU", lower_peak),
    Rule("retries", "No allocator retries in the fix", no_retries),
    Rule("settings", "Same settings except what is compared", same_settings),
)
