"""Made-up experiments: startups, outputs, hashes and settings, all equal unless a test changes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadpeak_exporter.ab.gate import Entry, Verdict, judge
from loadpeak_exporter.ab.records import FORMAT, Arm, Evidence, Experiment, Output, Prompt, Startup
from loadpeak_exporter.store import RunStore
from tests.exporter import building
from tests.exporter.building import GPU
from tests.fakes import FakeAllocator

BASELINE = Arm(name="baseline")
RELEASE = Arm(name="release", release="moe-layer")
COMMAND = ("vllm", "serve", "/home/anna/models/Qwen3", "--enforce-eager")
OUTPUTS = (
    Output(prompt=0, token_ids=(5, 6, 7), stop_reason="stop", logprobs=(-0.1, -0.2, -0.3)),
    Output(prompt=1, token_ids=(9, 9), stop_reason="length", logprobs=(-1.0, 0.0)),
)
SETTINGS = {
    "model_config.enforce_eager": "True",
    "model_config.dtype": "float16",
    "cache_config.gpu_memory_utilization": "0.9",
}
Change = Callable[[Evidence], Evidence]


def experiment(*arms: Arm, pairs: int = 2) -> Experiment:
    return Experiment(
        format=FORMAT,
        experiment="awq",
        created_at_wall_seconds=1796120832.0,
        hostname="gpu-host-7",
        command=COMMAND,
        arms=arms or (BASELINE, RELEASE),
        pairs=pairs,
        prompts=(Prompt(text="one"), Prompt(text="two")),
    )


def hashes(ranks: int) -> dict[int, dict[str, str]]:
    return {
        rank: {
            f"model.layers.{layer}.experts.{name}": f"{rank}{layer}{name}"
            for layer in range(4)
            for name in "wv"
        }
        for rank in range(ranks)
    }


def startup(
    home: Path,
    arm: Arm,
    pair: int,
    ranks: int = 1,
    layers: int = 4,
    allocator: Callable[[], FakeAllocator] = FakeAllocator,
    **facts: Any,
) -> Evidence:
    """One startup that was recorded and became ready; pairs are counted from one, as reports do."""
    run = f"{arm.name}-{pair}"
    known: dict[str, Any] = {
        "variant": arm.name,
        "split_limit": arm.split_limit,
        "alloc_conf": arm.alloc_conf or "expandable_segments:True",
        "hostname": "gpu-host-7",
        "engine_version": "0.26.0",
        "torch_version": "2.11.0",
        "model": "/home/anna/models/Qwen3",
        "quantization": "awq",
        "experiment": "awq",
        "world_size": ranks,
        **facts,
    }
    device = known.pop("device", GPU)
    for rank in range(ranks):
        made = building.Startup(home, run, rank, arm.release, device, allocator=allocator(), **known)
        made.load(layers, retries=False).ready().close()
    return Evidence(
        startup=Startup(
            pair=pair - 1,
            arm=arm.name,
            began_at_wall_seconds=1796120832.0 + 100 * pair,
            run=run,
            ready_after_seconds=40.0 + pair,
            outputs=OUTPUTS,
        ),
        run=RunStore(home).find(run),
        weights=hashes(ranks),
        settings=dict(SETTINGS),
    )


def evidence(home: Path, plan: Experiment, **options: Any) -> list[Evidence]:
    """All startups of an experiment."""
    return [startup(home, arm, pair, **options) for pair in range(1, plan.pairs + 1) for arm in plan.arms]


def change(found: Sequence[Evidence], arm: str, pair: int, how: Change) -> list[Evidence]:
    """The same evidence, with one startup changed."""
    return [how(item) if (item.startup.arm, item.startup.pair + 1) == (arm, pair) else item for item in found]


def with_startup(**fields: Any) -> Change:
    return lambda item: msgspec.structs.replace(item, startup=msgspec.structs.replace(item.startup, **fields))


def with_rank(number: int, **fields: Any) -> Change:
    """One rank of the run reads differently."""

    def changed(item: Evidence) -> Evidence:
        assert item.run is not None
        ranks = tuple(
            msgspec.structs.replace(rank, **fields) if rank.rank == number else rank
            for rank in item.run.ranks
        )
        return msgspec.structs.replace(item, run=msgspec.structs.replace(item.run, ranks=ranks))

    return changed


def with_header(**fields: Any) -> Change:
    def changed(item: Evidence) -> Evidence:
        assert item.run is not None
        header = msgspec.structs.replace(item.run.header, **fields)
        return msgspec.structs.replace(item, run=msgspec.structs.replace(item.run, header=header))

    return changed


def with_fields(**fields: Any) -> Change:
    return lambda item: msgspec.structs.replace(item, **fields)


def verdict_of(plan: Experiment, found: Sequence[Evidence]) -> tuple[Verdict, dict[str, Entry]]:
    """The verdict, and its entries by rule (of the only arm that is judged)."""
    verdict = judge(plan, found)
    return verdict, {entry.rule: entry for entry in verdict.gate}
