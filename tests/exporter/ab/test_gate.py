"""The gate: every rule with what it must let through and what it must find."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from loadpeak.record import Device, Fix
from loadpeak_exporter.ab.gate import exit_status, judge
from loadpeak_exporter.ab.gate_text import print_gate
from loadpeak_exporter.ab.records import Arm, Evidence
from loadpeak_exporter.ab.rules import RULES
from tests.exporter.ab.making import (
    BASELINE,
    OUTPUTS,
    RELEASE,
    SETTINGS,
    Change,
    change,
    evidence,
    experiment,
    hashes,
    startup,
    verdict_of,
    with_fields,
    with_header,
    with_rank,
    with_startup,
)
from tests.exporter.building import RESIDENT
from tests.fakes import AbsentAllocator, MiB

PLAN = experiment()
A100 = Device(kind="nvml", name="A100", total_bytes=40 << 30)


@pytest.fixture
def found(tmp_path: Path) -> list[Evidence]:
    return evidence(tmp_path, PLAN)


def one_bit(
    ranks: int = 1, rank: int = 0, name: str = "model.layers.2.experts.w"
) -> dict[int, dict[str, str]]:
    """Hashes of which one is another."""
    made = hashes(ranks)
    made[rank][name] += "x"
    return made


def output(number: int, **fields: Any) -> Change:
    outputs = list(OUTPUTS)
    outputs[number] = msgspec.structs.replace(outputs[number], **fields)
    return with_startup(outputs=tuple(outputs))


def test_equal_startups_with_a_lower_peak_pass(found: list[Evidence]) -> None:
    verdict, rules = verdict_of(PLAN, found)
    assert verdict.passed
    assert exit_status(verdict) == 0
    assert list(rules) == [rule.name for rule in RULES]
    details = {name: entry.detail for name, entry in rules.items()}
    assert details == {
        "ready": "both became ready",
        "weights": "8 tensors on 1 rank, all equal",
        "outputs": "2 prompts, 5 tokens, all equal; 1 came to a natural end",
        "logprobs": "10 of both arms, all finite",
        "ready-allocation": "100.000 MiB on 1 rank, equal to the byte",
        "device-peak": "worst GPU 720 → 630 MiB before the KV cache, 720 → 630 MiB whole startup",
        "retries": "0 in release, 0 in the baseline",
        "settings": "3 settings; compared: release: off → moe-layer",
    }


FAULTS: dict[str, tuple[str, Change, str]] = {
    "a startup failed": (
        "ready",
        with_startup(error="port 8000 is in use"),
        "release did not become ready: port",
    ),
    "one bit of a weight": (
        "weights",
        with_fields(weights=one_bit()),
        "of 8 tensors 1 differ: rank 0 model.layers.2.experts.w",
    ),
    "a tensor is missing": (
        "weights",
        with_fields(weights={0: dict(list(hashes(1)[0].items())[1:])}),
        "1 are only in baseline: rank 0 model.layers.0.experts.w",
    ),
    "a tensor is new": (
        "weights",
        with_fields(weights={0: {**hashes(1)[0], "new": "1"}}),
        "1 are only in release: rank 0 new",
    ),
    "one token": (
        "outputs",
        output(0, token_ids=(5, 8, 7)),
        "1 of 2 prompts: prompt 0 differs from token 1 on",
    ),
    "fewer tokens": (
        "outputs",
        output(0, token_ids=(5, 6), logprobs=(-0.1, -0.2)),
        "prompt 0 differs from token 2 on",
    ),
    "another stop": (
        "outputs",
        output(1, stop_reason="stop"),
        "prompt 1 stopped for another reason (length → stop)",
    ),
    "an answer is missing": (
        "outputs",
        with_startup(outputs=OUTPUTS[:1]),
        "prompt 1 was answered on one side only",
    ),
    "no log probability": (
        "logprobs",
        output(0, logprobs=(-0.1, None, -0.3)),
        "prompt 0 of release has 2 finite ones for 3",
    ),
    "infinite log probability": (
        "logprobs",
        output(1, logprobs=(-math.inf, -1.0)),
        "prompt 1 of release has 1 finite ones",
    ),
    "not a number": ("logprobs", output(1, logprobs=(math.nan, -1.0)), "1 finite ones for 2 tokens"),
    "too few log probabilities": ("logprobs", output(1, logprobs=(-1.0,)), "1 finite ones for 2 tokens"),
    "one byte more": ("ready-allocation", with_rank(0, ready_allocated_bytes=100 * MiB + 1), "(+1)"),
    "same peak": (
        "device-peak",
        with_rank(0, load_peak_bytes=720 * MiB),
        "rank 0 720 → 720 MiB is not lower",
    ),
    "a retry": ("retries", with_rank(0, retries=2), "2 in release, 0 in the baseline"),
    "another dtype": (
        "settings",
        with_fields(settings={**SETTINGS, "model_config.dtype": "bfloat16"}),
        "setting model_config.dtype: float16 → bfloat16",
    ),
    "a setting is missing": (
        "settings",
        with_fields(settings={"model_config.dtype": "float16"}),
        "setting model_config.enforce_eager: True → not set",
    ),
    "another format": ("settings", with_header(quantization="fp8"), "quantization: awq → fp8"),
    "another GPU": ("settings", with_rank(0, device=A100), "A100, 42,949,672,960 bytes"),
    "another version": ("settings", with_header(torch_version="2.12.0"), "torch_version: 2.11.0 → 2.12.0"),
    "another allocator": (
        "settings",
        with_header(alloc_conf="x:1"),
        "alloc_conf: expandable_segments:True → x:1",
    ),
    "the release is another": (
        "settings",
        with_header(release="layer"),
        "release asked for release moe-layer and ran with layer",
    ),
    "the release is inactive": (
        "settings",
        with_rank(
            0, fixes=(Fix(at_seconds=1, name="release", value="moe-layer", active=False, detail="cumem"),)
        ),
        "release, rank 0: release moe-layer is inactive: cumem",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pair", [1, 2])
def test_fault_in_one_pair_fails_its_rule_and_the_gate(found: list[Evidence], fault: str, pair: int) -> None:
    rule, how, words = FAULTS[fault]
    verdict, rules = verdict_of(PLAN, change(found, "release", pair, how))
    assert rules[rule].passed is False
    assert words in rules[rule].detail
    assert f"pair {pair}: " in rules[rule].detail
    assert not verdict.passed
    assert exit_status(verdict) == 1
    others = {name for name, entry in rules.items() if entry.passed is False} - {rule}
    assert not others, "a fault is found by the rule that is about it"


GAPS: dict[str, tuple[str, Change, str]] = {
    "hashes": ("weights", with_fields(weights=None), "no hashes were taken in release"),
    "tensors": ("weights", with_fields(weights={0: {}}), "no hashes were taken in release"),
    "one tensor": (
        "weights",
        with_fields(not_hashed={0: {"w2": "NotHashable: meta"}}),
        "1 could not be hashed: rank 0 w2 of release (NotHashable: meta); 8 tensors on 1 rank, all equal",
    ),
    "outputs": ("outputs", with_startup(outputs=None), "nothing was generated in release"),
    "tokens": ("outputs", with_startup(outputs=()), "nothing was generated in release"),
    "log probabilities": (
        "logprobs",
        output(0, logprobs=None),
        "prompt 0 of release has no log probabilities",
    ),
    "allocator": (
        "ready-allocation",
        with_rank(0, ready_allocated_bytes=None),
        "no reading of the allocator on rank 0",
    ),
    "device": ("device-peak", with_rank(0, load_peak_bytes=None), "no reading of the device of rank 0"),
    "count": ("retries", with_rank(0, retries=None), "no reading of the allocator"),
    "settings": ("settings", with_fields(settings=None), "the engine's settings were not read"),
    "record": ("device-peak", with_fields(run=None), "nothing was recorded"),
}


@pytest.mark.parametrize("gap", GAPS)
def test_what_cannot_be_judged_is_neither_passed_nor_failed(found: list[Evidence], gap: str) -> None:
    rule, how, words = GAPS[gap]
    verdict, rules = verdict_of(PLAN, change(found, "release", 1, how))
    assert rules[rule].passed is None
    assert f"pair 1: not judged: {words}" in rules[rule].detail
    assert not verdict.passed, "what was not shown was not shown"
    assert not [entry for entry in rules.values() if entry.passed is False]


def test_failed_arm_leaves_the_other_rules_unjudged(found: list[Evidence]) -> None:
    down = change(found, "baseline", 2, with_startup(error="oom in process_weights: CUDA out of memory"))
    verdict, rules = verdict_of(PLAN, down)
    assert "pair 2: baseline did not become ready: oom" in rules["ready"].detail
    assert {entry.passed for name, entry in rules.items() if name != "ready"} == {None}
    assert "pair 2: not judged: baseline did not become ready" in rules["weights"].detail
    assert verdict.pairs[1].baseline.error == "oom in process_weights: CUDA out of memory"


def test_startup_that_its_record_calls_dead_is_not_ready(found: list[Evidence]) -> None:
    run = found[1].run
    assert run is not None
    dead = with_fields(run=msgspec.structs.replace(run, outcome="oom"))
    _, rules = verdict_of(PLAN, change(found, "release", 1, dead))
    assert rules["ready"].detail.startswith("pair 1: release did not become ready: oom")


def test_interrupted_experiment_does_not_pass(found: list[Evidence]) -> None:
    verdict, rules = verdict_of(PLAN, found[:3])
    assert rules["ready"].passed is False
    assert "pair 2: release did not become ready: it was never started" in rules["ready"].detail
    assert not verdict.passed
    assert verdict.pairs[1].comparison is None
    assert not judge(PLAN, []).passed
    assert not judge(experiment(BASELINE), found).passed


def test_one_rank_of_four_is_enough_to_fail(tmp_path: Path) -> None:
    plan = experiment(pairs=1)
    found = evidence(tmp_path, plan, ranks=4)
    verdict, rules = verdict_of(plan, found)
    assert verdict.passed
    assert rules["weights"].detail == "32 tensors on 4 ranks, all equal"
    for rule, how, words in (
        ("weights", with_fields(weights=one_bit(4, rank=2)), "1 differ: rank 2 model.layers.2.experts.w"),
        ("ready-allocation", with_rank(3, ready_allocated_bytes=7), "rank 3 104,857,600 → 7 bytes"),
        ("device-peak", with_rank(1, load_peak_bytes=1 << 40), "rank 1 720 → 1,048,576 MiB is not lower"),
        ("retries", with_rank(2, retries=1), "1 in release"),
    ):
        _, rules = verdict_of(plan, change(found, "release", 1, how))
        assert rules[rule].passed is False
        assert words in rules[rule].detail
    without = {rank: tensors for rank, tensors in hashes(4).items() if rank != 3}
    some = [with_fields(weights=without)(item) for item in found]
    assert verdict_of(plan, some)[1]["weights"].detail == "not judged: no hashes were taken on rank 3"


def test_rank_of_one_side_only_is_no_equality(tmp_path: Path) -> None:
    plan = experiment(pairs=1)
    found = [
        startup(tmp_path, BASELINE, 1, ranks=2),
        startup(tmp_path, RELEASE, 1, ranks=1),
    ]
    _, rules = verdict_of(plan, found)
    assert rules["weights"].passed is False
    assert rules["ready-allocation"].passed is None
    assert rules["device-peak"].passed is None


EAGER = Arm(name="graphs", arguments=("--no-enforce-eager",))
GRAPH_SETTINGS = {**SETTINGS, "model_config.enforce_eager": "False"}


def test_equality_is_not_judged_across_modes(tmp_path: Path) -> None:
    plan = experiment(BASELINE, EAGER, pairs=1)
    found = change(evidence(tmp_path, plan), "graphs", 1, with_fields(settings=GRAPH_SETTINGS))
    verdict, rules = verdict_of(plan, found)
    for rule in ("weights", "outputs", "ready-allocation"):
        assert rules[rule].passed is None
        assert rules[rule].detail == (
            "not judged: graphs is another format or mode (--no-enforce-eager): "
            "setting model_config.enforce_eager: True → False"
        )
    assert rules["settings"].passed is True
    assert rules["device-peak"].passed is False
    assert not verdict.passed


@pytest.mark.parametrize(
    ("arm", "settings", "words"),
    [
        (EAGER, None, "no settings were read that would show its format and mode"),
        (Arm(name="new", environment="/opt/other"), dict(SETTINGS), "new uses another environment"),
    ],
)
def test_what_may_be_another_mode_counts_as_one(
    tmp_path: Path, arm: Arm, settings: dict[str, str] | None, words: str
) -> None:
    plan = experiment(BASELINE, arm, pairs=1)
    found = change(evidence(tmp_path, plan), arm.name, 1, with_fields(settings=settings))
    assert words in verdict_of(plan, found)[1]["outputs"].detail


def test_flags_explain_no_other_gpu(tmp_path: Path) -> None:
    plan = experiment(BASELINE, EAGER, pairs=1)
    other = change(evidence(tmp_path, plan), "graphs", 1, with_rank(0, device=A100))
    assert verdict_of(plan, other)[1]["settings"].passed is False


def test_flag_of_the_memory_budget_is_no_other_mode(tmp_path: Path) -> None:
    plan = experiment(
        BASELINE, Arm(name="less", release="layer", arguments=("--gpu-memory-utilization=0.5",)), pairs=1
    )
    found = change(
        evidence(tmp_path, plan),
        "less",
        1,
        with_fields(settings={**SETTINGS, "cache_config.gpu_memory_utilization": "0.5"}),
    )
    verdict, rules = verdict_of(plan, found)
    assert verdict.passed
    assert "setting cache_config.gpu_memory_utilization: 0.9 → 0.5" in rules["settings"].detail


def test_every_arm_is_judged_against_the_first(tmp_path: Path) -> None:
    split = Arm(name="split", split_limit="keep")
    plan = experiment(BASELINE, RELEASE, split)
    verdict = judge(plan, evidence(tmp_path, plan))
    assert [(entry.arm, entry.rule) for entry in verdict.gate] == [
        (arm, rule.name) for arm in ("release", "split") for rule in RULES
    ]
    peaks = {entry.arm: entry.passed for entry in verdict.gate if entry.rule == "device-peak"}
    assert peaks == {"release": True, "split": False}
    assert not verdict.passed
    assert [(pair.pair, pair.fix.arm) for pair in verdict.pairs] == [
        (1, "release"),
        (2, "release"),
        (1, "split"),
        (2, "split"),
    ]


def test_without_a_gpu_memory_is_not_judged(tmp_path: Path) -> None:
    plan = experiment(pairs=1)
    verdict, rules = verdict_of(plan, evidence(tmp_path, plan, device=RESIDENT, allocator=AbsentAllocator))
    states = {name: entry.passed for name, entry in rules.items()}
    assert states == {
        "ready": True,
        "weights": True,
        "outputs": True,
        "logprobs": True,
        "settings": True,
        "ready-allocation": None,
        "device-peak": None,
        "retries": None,
    }
    assert "no GPU was read; resident memory" in rules["device-peak"].detail
    assert not verdict.passed


def test_json_has_the_agreed_shape(found: list[Evidence]) -> None:
    printed = msgspec.json.decode(msgspec.json.encode(judge(PLAN, found)))
    assert printed.keys() == {"pairs", "gate", "passed"}
    assert printed["gate"][0] == {"rule": "ready", "passed": True, "detail": "both became ready"}
    assert all(entry.keys() == {"rule", "passed", "detail"} for entry in printed["gate"])
    assert printed["pairs"][0].keys() == {"pair", "baseline", "fix", "comparison"}
    assert printed["pairs"][0]["fix"] == {
        "arm": "release",
        "run": "release-1",
        "ready_after_seconds": 41.0,
        "error": None,
    }
    assert printed["pairs"][0]["comparison"]["peak_reduction_bytes"] == 90 * MiB


def test_terminal_shows_every_rule_with_its_verdict(found: list[Evidence]) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    print_gate(console, judge(PLAN, change(found, "release", 1, with_fields(weights=None))))
    text = console.export_text()
    assert re.search(r"weights +not judged +pair 1: not judged: no hashes were taken in release", text)
    assert re.search(r"outputs +passed +2 prompts", text)
    assert "the gate did not pass" in text
