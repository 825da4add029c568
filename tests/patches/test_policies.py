"""The policies and when each of them wants a release."""

from types import SimpleNamespace

import pytest

from loadpeak import settings
from loadpeak.record import Memory
from loadpeak_patches.policies import Policy, parse

MOE = SimpleNamespace(moe=True, method="vllm.x.SomeMoEMethod")
LINEAR = SimpleNamespace(moe=False, method="vllm.model_executor.layers.linear.UnquantizedLinearMethod")
GiB = 1 << 30


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("off", Policy("off")),
        ("moe-layer", Policy("moe-layer")),
        ("layer", Policy("layer")),
        ("threshold:2GiB", Policy("threshold", 2 * GiB)),
        ("threshold:1.5gib", Policy("threshold", 3 * GiB // 2)),
        ("threshold:512MiB", Policy("threshold", GiB // 2)),
        ("threshold:2GB", Policy("threshold", 2 * 10**9)),
        ("threshold:4096", Policy("threshold", 4096)),
    ],
)
def test_policy_is_read_as_it_is_spelled(text: str, policy: Policy) -> None:
    assert parse(text) == policy


@pytest.mark.parametrize(
    "text", ["banana", "threshold", "threshold:", "threshold:2X", "layer:3", "threshold:-1"]
)
def test_unknown_policy_is_refused_with_those_there_are(text: str) -> None:
    found = settings.load({"LOADPEAK_CACHE_RELEASE": text})
    assert found.cache_release == "off"
    (problem,) = found.problems
    assert f"LOADPEAK_CACHE_RELEASE={text!r}" in str(problem)
    assert "off, moe-layer, layer, threshold:SIZE" in str(problem)


def test_moe_layer_releases_after_experts_only() -> None:
    policy = parse("moe-layer")
    assert policy.wants(MOE, Memory())
    assert not policy.wants(LINEAR, Memory())


def test_layer_releases_after_everything_and_off_after_nothing() -> None:
    assert parse("layer").wants(LINEAR, Memory())
    assert not parse("off").wants(MOE, Memory())


def test_threshold_releases_when_so_much_is_cached() -> None:
    policy = parse("threshold:1GiB")
    assert policy.wants(LINEAR, Memory(allocated_bytes=GiB, reserved_bytes=2 * GiB))
    assert not policy.wants(LINEAR, Memory(allocated_bytes=GiB, reserved_bytes=2 * GiB - 1))
    assert not policy.wants(LINEAR, Memory()), "no reading, no release"


def test_split_limit_is_vllm_or_keep() -> None:
    assert settings.load({"LOADPEAK_SPLIT_LIMIT": "keep"}).split_limit == "keep"
    found = settings.load({"LOADPEAK_SPLIT_LIMIT": "kepe"})
    assert found.split_limit == "vllm"
    assert "vllm (what vLLM does) or keep" in str(found.problems[0])
