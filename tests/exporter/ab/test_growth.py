"""Where a peak lies, told from the record, and how far it is from the lowest possible one."""

from __future__ import annotations

import msgspec
import pytest

from loadpeak.record import Device, Phase
from loadpeak_exporter.ab.growth import distance, place
from loadpeak_exporter.host import Host
from loadpeak_exporter.records import LayerRecord, PhaseRecord, RankRecord
from loadpeak_exporter.store import RunReader
from tests.conftest import ROOT
from tests.exporter.building import GPU, RESIDENT
from tests.fakes import MiB

RECORDED = ROOT / "exporter" / "loadpeak_exporter" / "recorded"


def phase(name: Phase, at: float, live: int, reserved: int, device: int | None = None) -> PhaseRecord:
    return PhaseRecord(
        phase=name,
        started_at_seconds=at,
        allocated_peak_bytes=live * MiB,
        reserved_peak_bytes=reserved * MiB,
        device_used_peak_bytes=(reserved + 500 if device is None else device) * MiB,
    )


def layer(number: int, at: float, before: int, peak: int, after: int, live: int = 100) -> LayerRecord:
    return LayerRecord(
        layer=number,
        name=f"model.layers.{number}.experts",
        moe=True,
        done=True,
        started_at_seconds=at,
        ended_at_seconds=at + 0.5,
        duration_seconds=0.5,
        allocated_before_bytes=live * MiB,
        reserved_before_bytes=before * MiB,
        allocated_bytes=live * MiB,
        reserved_bytes=after * MiB,
        allocated_peak_bytes=live * MiB,
        reserved_peak_bytes=peak * MiB,
    )


def rank(phases: list[PhaseRecord], layers: list[LayerRecord], device: Device = GPU) -> RankRecord:
    return RankRecord(
        rank=0,
        local_rank=0,
        pid=1,
        started_at_seconds=0.0,
        started_at_wall_seconds=0.0,
        updated_at_seconds=100.0,
        outcome="ready",
        phase="ready",
        device=device,
        phases=tuple(phases),
        layers=tuple(layers),
    )


ACROSS = [layer(n, 20 + n, 100 + 40 * n, 140 + 40 * n, 140 + 40 * n) for n in range(6)]
INSIDE = [layer(n, 20 + n, 100, 340, 100) for n in range(6)]
FLAT = [layer(n, 20 + n, 100, 102, 100) for n in range(6)]


def startup(layers: list[LayerRecord], load: int = 100, process: int = 340, profile: int = 120) -> RankRecord:
    return rank(
        [
            phase("create_model", 5, 100, 100),
            phase("load_weights", 10, 100, load),
            phase("process_weights", 20, 100, process),
            phase("profile", 40, 100, profile),
            phase("kv_cache", 50, 900, 900),
        ],
        layers,
    )


def while_loading(layers: list[LayerRecord], load: int = 340) -> RankRecord:
    """Layers are converted inside weight loading: online quantization."""
    return rank([phase("load_weights", 10, 100, load), phase("process_weights", 60, 100, 100)], layers)


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (startup(ACROSS), "across layers", "by 40 MiB a layer up to layer 5; a release per layer helps"),
        (startup(INSIDE), "inside a layer", "by 240 MiB, and not from layer to layer; a release between"),
        (startup(FLAT, process=102, profile=100), "at the live allocation", "there is nothing to fix"),
        (
            startup(FLAT, load=400),
            "in weight loading",
            "while weights load, outside the conversion of layers",
        ),
        (startup([], load=400), "not known", "not known without layers and readings"),
        (startup(FLAT, profile=500), "after the layers", "it is not the conversion"),
        (
            while_loading(ACROSS),
            "in weight loading",
            "layers are converted while weights load, and the cache",
        ),
        (while_loading(INSIDE), "in weight loading", "layers are converted while weights load, and the peak"),
        (while_loading(FLAT, load=400), "in weight loading", "outside the conversion of layers"),
        (startup(FLAT, process=500), "after the layers", "it is not the conversion"),
        (rank([], FLAT), "at the live allocation", "nothing to fix"),
        (rank([], []), "not known", "not known"),
    ],
)
def test_place_of_the_peak_is_told_from_the_record(found: RankRecord, kind: str, words: str) -> None:
    where = place(found)
    assert where.kind == kind
    assert words in where.sentence


def test_keeping_the_split_limit_is_advised_where_there_is_one() -> None:
    found = startup(INSIDE)
    limited = msgspec.structs.replace(
        found,
        phases=tuple(
            msgspec.structs.replace(phase, settings="expandable_segments:True,max_split_size_mb:20")
            for phase in found.phases
        ),
    )
    assert place(limited).sentence == place(found).sentence + ", as --split-limit keep"


def test_layer_without_readings_leaves_the_place_unknown() -> None:
    torn = msgspec.structs.replace(ACROSS[2], reserved_peak_bytes=None, reserved_before_bytes=None)
    assert place(startup([*ACROSS[:2], torn, *ACROSS[3:]])).kind == "not known"


def test_lowest_peak_is_live_memory_and_context() -> None:
    far = distance(startup(ACROSS))
    assert far is not None
    assert (far.load_peak_bytes, far.context_bytes, far.lowest_bytes) == (840 * MiB, 500 * MiB, 600 * MiB)
    assert far.ratio == pytest.approx(1.4)


@pytest.mark.parametrize(
    "found",
    [
        rank([phase("load_weights", 1, 100, 200)], [], RESIDENT),
        rank([phase("load_weights", 1, 100, 200, device=150)], []),
        rank([], []),
    ],
    ids=["no GPU", "a sampler that missed the peak", "no phases"],
)
def test_distance_is_missing_without_readings(found: RankRecord) -> None:
    assert distance(found) is None


@pytest.mark.parametrize(
    ("name", "kind", "ratio"), [("baseline", "across layers", 1.94), ("moe-layer", "at", 1.01)]
)
def test_recorded_startups_lie_where_they_are_known_to(name: str, kind: str, ratio: float) -> None:
    run = RunReader(RECORDED / name, Host(None, None)).read()
    assert hasattr(run, "ranks")
    far = distance(run.ranks[0])
    assert place(run.ranks[0]).kind.startswith(kind)
    assert far is not None
    assert far.ratio == pytest.approx(ratio, abs=0.005)
