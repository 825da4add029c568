"""What reports of experiments and of single runs have in common."""

from __future__ import annotations

from collections.abc import Sequence

from loadpeak_exporter.history import Timeline
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.reports.document import Drawn
from loadpeak_exporter.store import RunStore

POINTS = 1000
"""Points of a curve in the charts, at most."""


def environment(runs: Sequence[RunRecord]) -> list[list[str]]:
    """What ran on what; several values where runs differ."""

    def of_header(field: str) -> list[str]:
        return [str(value) for run in runs if (value := getattr(run.header, field)) is not None]

    devices = [
        f"{len(run.ranks)} × {rank.device.name}"
        for run in runs
        for rank in run.ranks
        if rank.device is not None
    ]
    facts = {
        "model": of_header("model"),
        "quantization": of_header("quantization"),
        "load format": of_header("load_format"),
        "tensor parallel": of_header("tp_size"),
        "engine": [f"{run.header.engine or 'engine'} {run.header.engine_version or ''}" for run in runs],
        "torch": of_header("torch_version"),
        "allocator setting": of_header("alloc_conf"),
        "devices": devices,
        "loadpeak": of_header("loadpeak_version"),
    }
    return [[name, ", ".join(dict.fromkeys(values))] for name, values in facts.items() if values]


def draw(variant: str, run: RunRecord, store: RunStore) -> Drawn:
    """The rank with the highest load peak, for the charts."""
    rank = max(run.ranks, key=lambda rank: rank.load_peak_bytes or 0)
    reader = store.reader(run.run)
    reader.read()
    timeline = reader.timeline(rank.rank, POINTS)
    return Drawn(
        variant=variant,
        timeline=timeline
        or Timeline(rank=rank.rank, device_used_bytes=(), allocated_bytes=(), reserved_bytes=(), phases=()),
        layers=rank.layers,
        device_total_bytes=None if rank.device is None else rank.device.total_bytes,
        device_used_peak_bytes=rank.device_used_peak_bytes,
    )
