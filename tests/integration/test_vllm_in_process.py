"""A real vLLM in one process: what is recorded of it, and what faults do to it.

All engines start one after another in a single process, which costs seconds instead of half a minute
each; every one has its own settings, and its own fault.
"""

from pathlib import Path
from typing import Any

import pytest

from loadpeak.record import (
    Conversion,
    DeviceFound,
    Exporter,
    Failure,
    Fix,
    HookError,
    Memory,
    Model,
    PhaseEnd,
    PhaseStart,
    RankStart,
    Ready,
    Sample,
    decode_header,
)
from tests.integration.conftest import Engines, start_engines
from tests.integration.engine_names import OOM, OTHER

pytestmark = pytest.mark.vllm

ONLINE = {"quantization": "int8_per_channel_weight_only"}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {"env": {"LOADPEAK_VARIANT": "first", "LOADPEAK_EXPERIMENT": "suite"}},
    "dummy": {"llm": {"load_format": "dummy"}},
    "online": {"llm": ONLINE, "sabotage": "int8_experts", "generate": False},
    "online-dummy": {
        "llm": {**ONLINE, "load_format": "dummy"},
        "sabotage": "int8_experts",
        "generate": False,
    },
    "draft": {"llm": {"speculative_config": DRAFT}},
    "oom": {"sabotage": "oom_in_layer"},
    "error": {"sabotage": "error_in_layer"},
    "sampler-killed": {"sabotage": "kill_sampler"},
    "banana": {"env": {"LOADPEAK_CACHE_RELEASE": "banana"}},
    "release": {"env": {"LOADPEAK_CACHE_RELEASE": "moe-layer", "LOADPEAK_SPLIT_LIMIT": "keep"}},
    "no-store": {"env": {"LOADPEAK_HOME": "/proc/nowhere"}},
    "unobserved": {"env": {"LOADPEAK_DISABLE": "1"}},
}
TOKENS = 4


@pytest.fixture(scope="module")
def engines(vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    home = tmp_path_factory.mktemp("home")
    multiproc = tmp_path_factory.mktemp("prometheus")
    scenarios = []
    for name, scenario in SCENARIOS.items():
        llm = dict(scenario.get("llm", {}))
        if "speculative_config" in llm:
            llm["speculative_config"] = {**llm["speculative_config"], "model": str(tiny_model)}
        environ = {"LOADPEAK_RUN_ID": name, **scenario.get("env", {})}
        scenarios.append({**scenario, "llm": llm, "env": environ})
    return start_engines(vllm_python, tiny_model, home, scenarios, PROMETHEUS_MULTIPROC_DIR=str(multiproc))


def result(engines: Engines, name: str) -> dict[str, Any]:
    return engines.results[list(SCENARIOS).index(name)]


def test_every_phase_is_recorded_in_order_and_ends(engines: Engines) -> None:
    record = engines.record("plain")
    phases = [line.phase for line in record.of(PhaseStart)]
    assert phases == [
        "init_device",
        "create_model",
        "load_weights",
        "process_weights",
        "profile",
        "kv_cache",
        "warmup",
    ]
    assert [line.phase for line in record.of(PhaseEnd)] == phases
    assert record.one(Ready)
    assert isinstance(record[0], RankStart)


def test_every_layer_is_recorded_with_its_number_and_kind(engines: Engines) -> None:
    record = engines.record("plain")
    model = record.one(Model)
    assert model.layers == model.moe_layers == (0, 1, 2, 3)
    conversions = record.of(Conversion)
    assert len(conversions) == model.conversions == 18
    experts = [line for line in conversions if line.moe]
    assert [line.layer for line in experts] == [0, 1, 2, 3]
    assert all("UnquantizedFusedMoEMethod" in line.method for line in experts)
    assert [line.layer for line in conversions if line.layer_done] == [0, 1, 2, 3]
    assert {line.phase for line in conversions} == {"process_weights"}


def test_header_names_model_engine_and_versions(engines: Engines, tiny_model: Path) -> None:
    header = decode_header((engines.home / "runs" / "plain" / "run.json").read_bytes())
    assert header.model == str(tiny_model)
    assert (header.variant, header.experiment, header.engine) == ("first", "suite", "vllm")
    assert (header.tp_size, header.world_size) == (1, 1)
    assert header.engine_version
    assert header.torch_version


def test_engine_computes_the_same_with_and_without_the_plugin(engines: Engines) -> None:
    assert result(engines, "plain")["tokens"] == result(engines, "unobserved")["tokens"]
    assert not (engines.home / "runs" / "unobserved").exists()


def test_no_hook_is_left_when_the_engine_serves(engines: Engines) -> None:
    for name in ("plain", "online", "draft", "release"):
        assert result(engines, name)["leftovers"] == [], name


def test_engine_that_is_dropped_is_freed(engines: Engines) -> None:
    for name in ("plain", "online", "release", "unobserved"):
        assert result(engines, name)["freed"], name


def test_without_cuda_allocator_figures_are_missing_and_resident_memory_stands_in(engines: Engines) -> None:
    for line in engines.record("plain").of(Conversion):
        assert line.before == line.after == Memory()
        assert line.reserved_peak_bytes is None
    samples = engines.samples("plain")
    assert samples.one(DeviceFound).device.kind == "resident"
    assert all(sample.used_bytes for sample in samples.of(Sample))
    assert {"load_weights", "kv_cache", "ready"} <= {sample.phase for sample in samples.of(Sample)}


def test_dummy_weights_are_recorded_like_real_ones(engines: Engines) -> None:
    assert result(engines, "dummy")["ready"]
    assert len(engines.record("dummy").of(Conversion)) == 18


@pytest.mark.parametrize("name", ["online", "online-dummy"])
def test_online_quantization_converts_while_weights_load(engines: Engines, name: str) -> None:
    assert result(engines, name)["ready"]
    experts = [line for line in engines.record(name).of(Conversion) if line.moe]
    assert [(line.layer, line.phase) for line in experts[:4]] == [(n, "load_weights") for n in range(4)]
    assert len(engines.record(name).of(Ready)) == 1


def test_layers_of_a_draft_model_are_numbered_on(engines: Engines) -> None:
    record = engines.record("draft")
    assert [line.layers for line in record.of(Model)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {line.layer for line in record.of(Conversion) if line.moe} == set(range(8))
    assert [line.phase for line in record.of(PhaseStart)].count("load_weights") == 2


def test_out_of_memory_in_a_layer_is_recorded_with_its_message_and_passes_unchanged(
    engines: Engines,
) -> None:
    assert result(engines, "oom") == {"ready": False, "error": "OutOfMemoryError", "message": OOM}
    failure = engines.record("oom").one(Failure)
    assert (failure.outcome, failure.message, failure.phase) == ("oom", OOM, "process_weights")
    last = engines.record("oom").of(Conversion)[-1]
    assert last.failed
    assert last.layer == 2


def test_other_error_of_a_loader_is_a_failed_startup(engines: Engines) -> None:
    assert result(engines, "error") == {"ready": False, "error": "ValueError", "message": OTHER}
    failure = engines.record("error").one(Failure)
    assert (failure.outcome, failure.error, failure.message) == ("failed", "ValueError", OTHER)


def test_engine_goes_on_when_its_sampler_is_killed(engines: Engines) -> None:
    assert result(engines, "sampler-killed")["tokens"] == result(engines, "plain")["tokens"]
    record = engines.record("sampler-killed")
    assert record.one(Ready)
    assert "ended with -9" in record.of(HookError)[0].error
    assert engines.samples("sampler-killed").of(Sample), "what was sampled before is there"


def test_unknown_policy_starts_the_engine_with_off_and_names_the_policies(engines: Engines) -> None:
    assert result(engines, "banana")["tokens"] == result(engines, "plain")["tokens"]
    assert not engines.record("banana").of(Fix)
    assert (
        "LOADPEAK_CACHE_RELEASE='banana' cannot be used: expected one of the policies off, moe-layer"
        in engines.log
    )


def test_fixes_say_that_they_are_inactive_on_a_cpu(engines: Engines) -> None:
    fixes = engines.record("release").of(Fix)
    assert [(fix.name, fix.active) for fix in fixes] == [("release", False), ("split_limit", False)]
    assert all("no CUDA caching allocator" in fix.detail for fix in fixes)


def test_engine_starts_when_the_run_store_cannot_be_written(engines: Engines) -> None:
    assert result(engines, "no-store")["tokens"] == result(engines, "plain")["tokens"]
    assert "nothing is recorded, the run store /proc/nowhere cannot be written" in engines.log


def test_exporter_is_recorded_and_no_hook_failed(engines: Engines) -> None:
    for name in ("plain", "dummy", "online", "draft", "release"):
        record = engines.record(name)
        assert not record.of(HookError), name
        assert 9838 <= record.one(Exporter).port < 9838 + 50


def test_prometheus_multiprocess_folder_of_vllm_stays_empty_of_our_metrics(engines: Engines) -> None:
    """vLLM sets PROMETHEUS_MULTIPROC_DIR with several API servers; ours must not write there."""
    assert "loadpeak_" not in "".join(
        path.read_bytes().decode("latin-1") for path in engines.home.parent.glob("prometheus*/*")
    )
