"""What stands on /metrics, read through Prometheus's own parser."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadpeak_exporter.catalogue import CATALOGUE, COMMON_LABELS
from loadpeak_exporter.collector import RunCollector, registry
from loadpeak_exporter.exposition import Exposition
from loadpeak_exporter.host import Host
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunReader
from tests.exporter.building import RESIDENT, Startup
from tests.fakes import AbsentAllocator, MiB

DESIGN = """
run_info run_outcome phase phase_duration_seconds layers layers_done allocator_allocated_bytes
allocator_reserved_bytes allocator_inactive_split_bytes allocator_reserved_peak_bytes
allocator_allocated_peak_bytes allocator_retries_total allocator_ooms_total device_total_bytes
device_used_bytes device_used_peak_bytes startup_headroom_bytes ready_allocated_bytes
layer_allocated_bytes layer_reserved_bytes layer_allocated_peak_bytes layer_reserved_peak_bytes
layer_device_peak_bytes layer_released_bytes layer_duration_seconds sampler_gap_seconds hook_errors_total
"""


def run_of(startup: Startup) -> RunRecord:
    record = RunReader(startup.folder, Host(None, None, wall=lambda: 0.0)).read()
    assert isinstance(record, RunRecord)
    return record


def parse(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    samples = [s for family in text_string_to_metric_families(text.decode()) for s in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


def value(text: bytes, name: str, **labels: str) -> float | None:
    found = [
        sample_value
        for (sample, pairs), sample_value in parse(text).items()
        if sample == name and labels.items() <= dict(pairs).items()
    ]
    assert len(found) <= 1, f"{name} {labels} is not one series"
    return found[0] if found else None


def names(samples: Iterable[Sample]) -> set[str]:
    return {sample.name for sample in samples}


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return run_of(Startup(tmp_path, release="moe-layer", variant="moe-layer").load().ready())


def test_catalogue_has_every_family_of_the_design_and_no_other() -> None:
    assert [metric.name for metric in CATALOGUE] == [f"loadpeak_{name}" for name in DESIGN.split()]


def test_every_family_is_exported_for_a_finished_run(run: RunRecord) -> None:
    exported = {name for name, _ in parse(Exposition().render([run]))}
    assert exported == {metric.name for metric in CATALOGUE}


def test_fast_text_and_prometheus_client_tell_the_same(run: RunRecord, tmp_path: Path) -> None:
    odd = run_of(Startup(tmp_path, "odd", variant='a"b\\c', model="line\nbreak", rank=3).load(3))
    runs = [run, odd]
    assert parse(Exposition().render(runs)) == parse(generate_latest(registry(lambda: runs)))
    first = Exposition().render(runs).decode().splitlines()
    second = generate_latest(registry(lambda: runs)).decode().splitlines()
    assert [line for line in first if line[0] == "#"] == [line for line in second if line[0] == "#"]


def test_series_carry_run_variant_rank_and_gpu(run: RunRecord) -> None:
    for _, pairs in parse(Exposition().render([run])):
        assert set(COMMON_LABELS) <= dict(pairs).keys()
    text = Exposition().render([run])
    labels = {"run": "source", "variant": "moe-layer", "rank": "0", "gpu": "GPU-a"}
    assert value(text, "loadpeak_startup_headroom_bytes", **labels) == (32 << 30) - 630 * MiB


def test_layer_label_sorts(run: RunRecord) -> None:
    text = Exposition().render([run])
    assert value(text, "loadpeak_layer_reserved_peak_bytes", layer="001") == 130 * MiB
    assert value(text, "loadpeak_layer_released_bytes", layer="001") == 30 * MiB


def test_outcome_and_phase_are_one_of_all(tmp_path: Path) -> None:
    startup = Startup(tmp_path).load()
    text = Exposition().render([run_of(startup)])
    assert value(text, "loadpeak_run_outcome", outcome="loading") == 1
    assert value(text, "loadpeak_run_outcome", outcome="ready") == 0
    assert value(text, "loadpeak_phase", phase="process_weights") == 1
    assert value(text, "loadpeak_phase", phase="ready") == 0
    text = Exposition().render([run_of(startup.ready())])
    assert value(text, "loadpeak_run_outcome", outcome="ready") == 1
    assert value(text, "loadpeak_phase", phase="ready") == 1


def test_missing_reading_is_a_missing_series(tmp_path: Path) -> None:
    startup = Startup(tmp_path, device=RESIDENT, allocator=AbsentAllocator()).load().ready()
    text = Exposition().render([run_of(startup)])
    exported = {name for name, _ in parse(text)}
    assert not {
        name for name in exported if "allocator" in name or "headroom" in name or "total_bytes" in name
    }
    assert value(text, "loadpeak_device_used_bytes", gpu="resident") is not None
    assert all(not math.isnan(number) and number >= 0 for number in parse(text).values())


@pytest.mark.parametrize(("layers", "expected"), [("all", {"000", "001"}), ("moe", {"001"}), ("off", set())])
def test_layers_with_series_of_their_own_can_be_limited(
    tmp_path: Path, layers: str, expected: set[str]
) -> None:
    startup = Startup(tmp_path)
    startup.session.start_phase("process_weights")
    startup.convert(0, moe=False)
    startup.convert(1, moe=True)
    run = run_of(startup)
    found = {dict(pairs).get("layer") for _, pairs in parse(Exposition(layers).render([run]))} - {None}
    assert found == expected
    families = list(RunCollector(lambda: [run], layers).collect())
    assert {s.labels.get("layer") for f in families for s in f.samples} - {None} == expected


def test_text_is_kept_while_records_are_the_same_objects(run: RunRecord, tmp_path: Path) -> None:
    exposition = Exposition()
    text = exposition.render([run])
    assert exposition.render([run]) is text
    other = run_of(Startup(tmp_path, "other").load())
    assert exposition.render([run, other]) != text
    assert exposition.render([run]) == text


def test_finished_layers_follow_the_device_label(tmp_path: Path) -> None:
    """Lines of a finished layer are kept; they must not keep a label that has changed since."""
    startup = Startup(tmp_path).load()
    reader = RunReader(startup.folder, Host(None, None, wall=lambda: 0.0))
    exposition = Exposition()
    record = reader.read()
    assert isinstance(record, RunRecord)
    renamed = run_of(Startup(tmp_path, "again", variant="other").load())
    assert b'variant="other"' in exposition.render([record, renamed])
    startup.ready()
    record = reader.read()
    assert isinstance(record, RunRecord)
    assert parse(exposition.render([record])) == parse(generate_latest(registry(lambda: [record])))


def test_collector_does_no_work_when_it_is_described(run: RunRecord) -> None:
    def explode() -> list[RunRecord]:
        raise AssertionError("read at registration")

    assert list(RunCollector(explode).describe()) == []
    registry(explode)


def test_multiprocess_mode_of_prometheus_client_does_not_reach_us(
    run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sets this with several API servers: ordinary metrics then become files in its folder."""
    folder = tmp_path / "multiproc"
    folder.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    assert b"loadpeak_layers " in re.sub(rb"\{[^}]*\}", b"", generate_latest(registry(lambda: [run])))
    assert list(folder.iterdir()) == []


def test_units_and_help_follow_the_conventions() -> None:
    for metric in CATALOGUE:
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.name.startswith("vllm")
