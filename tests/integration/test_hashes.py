"""Hashes of real tensors on the CPU: exact, by content alone, within little memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import HERE, environment

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def found(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``hash_script.py`` prints."""
    done = subprocess.run(
        [vllm_python, HERE / "hash_script.py"],
        env=environment(tmp_path_factory.mktemp("home")),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_change_of_any_bit_of_any_type_is_seen(found: dict[str, Any]) -> None:
    assert len(found["unseen_bits"]) >= 17
    assert set(found["unseen_bits"].values()) == {0}


def test_strides_do_not_matter_and_hide_nothing(found: dict[str, Any]) -> None:
    assert found["strides"] == []


def test_other_differences_are_told_apart(found: dict[str, Any]) -> None:
    assert all(found["told_apart"].values()), found["told_apart"]


def test_everything_a_model_prepared_is_found_by_name(found: dict[str, Any]) -> None:
    assert found["names"] == [
        "head.weight",
        "layers.0.packed_weight.data_part",
        "layers.0.packed_weight.scale_part",
        "layers.0.quant_method.w2_precision_config.weight_scale",
        "layers.0.scale",
        "layers.0.steps",
        "layers.0.w13_weight.storage.data",
        "layers.0.weight",
    ]


def test_tensor_without_readable_content_has_a_reason(found: dict[str, Any]) -> None:
    assert "on the meta device" in found["reasons"]["meta"]
    assert "layout is torch.sparse_coo" in found["reasons"]["sparse"]
    assert "torch.qint8" in found["reasons"]["quantized"]
    assert "uninitialized" in found["reasons"]["uninitialized"]


def test_large_tensor_is_hashed_in_little_memory(found: dict[str, Any]) -> None:
    """A transposed one of 256 MiB, which nothing may copy as a whole."""
    assert found["growth_bytes"] < 100 << 20


def test_hash_is_the_same_everywhere(found: dict[str, Any]) -> None:
    """Runs of different versions are compared with each other."""
    assert found["golden"] == "bf58c8d1637706fd1410a6884acc883144015e5ba7b4a9fa433f88831677965f"


@pytest.mark.parametrize("name", ["parameter", "aliases", "grad mode"])
def test_nothing_is_disturbed(found: dict[str, Any], name: str) -> None:
    """Parameters that mind their use, views of one memory, PyTorch's modes."""
    assert found[name]
