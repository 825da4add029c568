"""What may differ between two startups: the settings in force, and whether they explain a difference.

Hashes and tokens can only be equal where the same program computes with the same numbers. Of all settings
only the allocator's and those of the memory budget leave format and mode alone; whatever else an arm
changes makes it another format or mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loadpeak_exporter.ab.records import Evidence
from loadpeak_exporter.ab.trial import Finding, Trial
from loadpeak_exporter.text import plural

_VERSIONS = ("engine", "engine_version", "torch_version", "loadpeak_version")
_ENGINE = ("model", "quantization", "load_format", "tp_size", "world_size")
_BUDGET = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks", "num_gpu_blocks_override"}
"""Last parts of the names of settings that decide how large the KV cache is, and nothing else."""


class Difference(NamedTuple):
    """A setting that is not the same on both sides.

    Attributes:
        name: of the setting.
        before: its value in the baseline.
        after: its value in the fix.
        explained: whether it is what the arm changes.
        format_or_mode: whether results may differ because of it.
    """

    name: str
    before: str | None
    after: str | None
    explained: bool
    format_or_mode: bool

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.before)} → {_shown(self.after)}"


def _shown(value: str | None) -> str:
    return "not set" if value is None else value


def differences(trial: Trial) -> list[Difference]:
    """Every setting that differs; those which only one side knows too."""
    asked = {
        "release": trial.arm.release != trial.baseline_arm.release,
        "split limit": trial.arm.split_limit != trial.baseline_arm.split_limit,
        "alloc_conf": trial.arm.alloc_conf != trial.baseline_arm.alloc_conf,
    }
    asked["allocator while loading"] = asked["split limit"] or asked["alloc_conf"]
    other_program = trial.arm.environment != trial.baseline_arm.environment
    other_flags = other_program or trial.arm.arguments != trial.baseline_arm.arguments
    unread = None in (trial.baseline.settings, trial.fix.settings)
    before, after = (dict(_facts(evidence, not unread)) for _, evidence in trial.sides)
    found: list[Difference] = []
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) == after.get(name):
            continue
        kind = name.partition(" ")[0]
        engine = kind in _VERSIONS or kind in _ENGINE or kind == "setting"
        explained = asked.get(name, other_program if kind in _VERSIONS else other_flags and kind != "GPU")
        mode = engine and kind != "loadpeak_version" and name.rpartition(".")[2] not in _BUDGET
        found.append(Difference(name, before.get(name), after.get(name), explained, mode))
    return found


def _facts(evidence: Evidence, with_settings: bool) -> Iterator[tuple[str, str | None]]:
    """Everything that is compared, by name."""
    run = evidence.run
    if run is not None:
        header = run.header
        yield "release", header.release
        yield "split limit", header.split_limit
        yield "alloc_conf", header.alloc_conf
        in_force = {
            phase.settings for rank in run.ranks for phase in rank.phases if phase.phase == "load_weights"
        }
        yield "allocator while loading", " and ".join(sorted(filter(None, in_force))) or None
        for name in (*_VERSIONS, *_ENGINE):
            value = getattr(header, name)
            yield name, None if value is None else str(value)
        for rank in run.ranks:
            if rank.device is not None:
                size = "" if rank.device.total_bytes is None else f", {rank.device.total_bytes:,} bytes"
                yield f"GPU of rank {rank.rank}", rank.device.name + size
    if with_settings:
        for name, value in (evidence.settings or {}).items():
            yield f"setting {name}", value


def other_mode(trial: Trial) -> str | None:
    """Why equality cannot be judged in this arm; nothing where format and mode are the baseline's."""
    if trial.arm.environment != trial.baseline_arm.environment:
        return f"{trial.arm.name} uses another environment, and equality is judged within one program only"
    if trial.arm.arguments == trial.baseline_arm.arguments:
        return None
    flags = " ".join(trial.arm.arguments) or "no flags"
    if trial.baseline.settings is None or trial.fix.settings is None:
        return f"{trial.arm.name} adds {flags}, and no settings were read that would show its format and mode"
    changed = [str(found) for found in differences(trial) if found.format_or_mode]
    if not changed:
        return None
    return f"{trial.arm.name} is another format or mode ({flags}): {_some(changed)}"


def same_settings(trial: Trial) -> Finding:
    """Same effective settings in both arms, except what is compared."""
    if trial.baseline.run is None or trial.fix.run is None:
        return Finding(None, "not judged: nothing was recorded")
    broken = _not_in_force(trial)
    found = differences(trial)
    stray = [str(difference) for difference in found if not difference.explained]
    if broken or stray:
        parts = [*broken, *(["differs without being compared: " + _some(stray)] if stray else [])]
        return Finding(False, "; ".join(parts))
    compared = _some([str(difference) for difference in found]) or "nothing differs"
    if trial.baseline.settings is None or trial.fix.settings is None:
        return Finding(None, f"not judged: the engine's settings were not read; compared: {compared}")
    return Finding(True, f"{plural(len(trial.fix.settings), 'setting')}; compared: {compared}")


def _not_in_force(trial: Trial) -> list[str]:
    """What an arm asked for and did not get."""
    found: list[str] = []
    for arm, evidence in ((trial.baseline_arm, trial.baseline), (trial.arm, trial.fix)):
        run = evidence.run
        if run is None:
            continue
        for name, wanted, got in (
            ("release", arm.release, run.header.release),
            ("split limit", arm.split_limit, run.header.split_limit),
        ):
            if wanted != got:
                found.append(f"{arm.name} asked for {name} {wanted} and ran with {got}")
        found += [
            f"{arm.name}, rank {rank.rank}: {fix.name} {fix.value} is inactive: {fix.detail}"
            for rank in run.ranks
            for fix in rank.fixes
            if not fix.active
        ]
    return found


def _some(texts: list[str], most: int = 6) -> str:
    """The first few, and how many more."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more
