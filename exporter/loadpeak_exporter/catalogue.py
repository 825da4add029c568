"""The metric catalogue: the only place where metrics are declared.

Collector, exposition, dashboards, rules and docs read :data:`CATALOGUE`. Every series carries ``run``,
``variant``, ``rank`` and ``gpu``, then the labels of its own. ``gpu`` is the device's UUID, ``resident``
where a process's resident memory stands in, and empty while the device is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from loadpeak.record import OUTCOMES, PHASES
from loadpeak_exporter.records import LayerRecord, RankRecord, RunRecord

COMMON_LABELS = ("run", "variant", "rank", "gpu")

Value = float | int | None
Series = Iterable[tuple[tuple[str, ...], Value]]
"""Values of a metric's own labels, and the value; a missing value is a missing series."""


class Metric(NamedTuple):
    """One family.

    Attributes:
        name: as exported, with its unit.
        kind: ``gauge`` or ``counter``.
        help: one sentence.
        labels: its own labels, after the common ones.
        series: reads it from a rank; for a family per layer, from a layer.
        per_layer: whether there is one series per layer.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    series: Callable[[RunRecord, RankRecord], Series] = lambda run, rank: ()
    layer_value: Callable[[LayerRecord], Value] | None = None

    @property
    def per_layer(self) -> bool:
        """Whether there is one series per layer."""
        return self.layer_value is not None


def gpu_label(rank: RankRecord) -> str:
    """The ``gpu`` label of a rank's series."""
    if rank.device is None:
        return ""
    return "resident" if rank.device.kind == "resident" else rank.device.uuid or ""


def layer_label(layer: int) -> str:
    """The ``layer`` label: zero-padded, so that it sorts."""
    return f"{layer:03}"


def _one(read: Callable[[RankRecord], Value]) -> Callable[[RunRecord, RankRecord], Series]:
    return lambda run, rank: (((), read(rank)),)


def _info(run: RunRecord, rank: RankRecord) -> Series:
    header = run.header
    values = (
        header.experiment,
        header.model,
        header.quantization,
        header.engine,
        header.engine_version,
        header.torch_version,
        header.alloc_conf,
        header.release,
        header.split_limit,
        rank.device.name if rank.device else None,
        header.tp_size,
    )
    return ((tuple("" if value is None else str(value) for value in values), 1),)


def _phases(read: str) -> Callable[[RunRecord, RankRecord], Series]:
    return lambda run, rank: [((phase.phase,), getattr(phase, read)) for phase in rank.phases]


CATALOGUE: tuple[Metric, ...] = (
    Metric(
        "loadpeak_run_info",
        "gauge",
        "What ran; always 1.",
        (
            "experiment",
            "model",
            "quantization",
            "engine",
            "engine_version",
            "torch_version",
            "alloc_conf",
            "release",
            "split_limit",
            "gpu_name",
            "tp_size",
        ),
        _info,
    ),
    Metric(
        "loadpeak_run_outcome",
        "gauge",
        "1 for the outcome of the run, 0 for the others.",
        ("outcome",),
        lambda run, rank: [((outcome,), int(outcome == run.outcome)) for outcome in OUTCOMES],
    ),
    Metric(
        "loadpeak_phase",
        "gauge",
        "1 for the phase the rank is in, 0 for the others.",
        ("phase",),
        lambda run, rank: [((phase,), int(phase == rank.phase)) for phase in PHASES],
    ),
    Metric(
        "loadpeak_phase_duration_seconds",
        "gauge",
        "Time a phase took, once it has ended.",
        ("phase",),
        _phases("duration_seconds"),
    ),
    Metric(
        "loadpeak_layers", "gauge", "Layers that will be converted.", series=_one(lambda r: r.layers_expected)
    ),
    Metric(
        "loadpeak_layers_done",
        "gauge",
        "Layers that have been converted.",
        series=_one(lambda r: r.layers_done),
    ),
    Metric(
        "loadpeak_allocator_allocated_bytes",
        "gauge",
        "Memory in live tensors, at the last reading.",
        series=_one(lambda r: r.memory.allocated_bytes),
    ),
    Metric(
        "loadpeak_allocator_reserved_bytes",
        "gauge",
        "Memory the caching allocator holds, at the last reading.",
        series=_one(lambda r: r.memory.reserved_bytes),
    ),
    Metric(
        "loadpeak_allocator_inactive_split_bytes",
        "gauge",
        "Free parts of split blocks, which cannot be released, at the last reading.",
        series=_one(lambda r: r.memory.inactive_split_bytes),
    ),
    Metric(
        "loadpeak_allocator_reserved_peak_bytes",
        "gauge",
        "Most that the caching allocator held during a phase.",
        ("phase",),
        _phases("reserved_peak_bytes"),
    ),
    Metric(
        "loadpeak_allocator_allocated_peak_bytes",
        "gauge",
        "Most that was in live tensors during a phase.",
        ("phase",),
        _phases("allocated_peak_bytes"),
    ),
    Metric(
        "loadpeak_allocator_retries_total",
        "counter",
        "Allocations that only succeeded after the cache was flushed.",
        series=_one(lambda r: r.retries),
    ),
    Metric(
        "loadpeak_allocator_ooms_total",
        "counter",
        "Allocations that failed for good.",
        series=_one(lambda r: r.ooms),
    ),
    Metric(
        "loadpeak_device_total_bytes",
        "gauge",
        "Memory of the device, as NVML tells it.",
        series=_one(lambda r: r.device.total_bytes if r.device else None),
    ),
    Metric(
        "loadpeak_device_used_bytes",
        "gauge",
        "Memory in use on the device by everybody, at the last sample.",
        series=_one(lambda r: r.device_used_bytes),
    ),
    Metric(
        "loadpeak_device_used_peak_bytes",
        "gauge",
        "Most that was in use on the device during a phase.",
        ("phase",),
        _phases("device_used_peak_bytes"),
    ),
    Metric(
        "loadpeak_startup_headroom_bytes",
        "gauge",
        "Memory of the device less the highest use since the start.",
        series=_one(lambda r: r.headroom_bytes),
    ),
    Metric(
        "loadpeak_ready_allocated_bytes",
        "gauge",
        "Memory in live tensors when the engine became ready.",
        series=_one(lambda r: r.ready_allocated_bytes),
    ),
    Metric(
        "loadpeak_layer_allocated_bytes",
        "gauge",
        "Memory in live tensors after the layer.",
        ("layer",),
        layer_value=lambda layer: layer.allocated_bytes,
    ),
    Metric(
        "loadpeak_layer_reserved_bytes",
        "gauge",
        "Memory the caching allocator holds after the layer.",
        ("layer",),
        layer_value=lambda layer: layer.reserved_bytes,
    ),
    Metric(
        "loadpeak_layer_allocated_peak_bytes",
        "gauge",
        "Most that was in live tensors inside the layer.",
        ("layer",),
        layer_value=lambda layer: layer.allocated_peak_bytes,
    ),
    Metric(
        "loadpeak_layer_reserved_peak_bytes",
        "gauge",
        "Most that the caching allocator held inside the layer.",
        ("layer",),
        layer_value=lambda layer: layer.reserved_peak_bytes,
    ),
    Metric(
        "loadpeak_layer_device_peak_bytes",
        "gauge",
        "Most that was in use on the device inside the layer.",
        ("layer",),
        layer_value=lambda layer: layer.device_peak_bytes,
    ),
    Metric(
        "loadpeak_layer_released_bytes",
        "gauge",
        "Memory given back to the device after the layer; missing where no release was asked for.",
        ("layer",),
        layer_value=lambda layer: layer.released_bytes,
    ),
    Metric(
        "loadpeak_layer_duration_seconds",
        "gauge",
        "Time the layer's conversions took.",
        ("layer",),
        layer_value=lambda layer: layer.duration_seconds,
    ),
    Metric(
        "loadpeak_sampler_gap_seconds",
        "gauge",
        "The longest time between two device samples.",
        series=_one(lambda r: r.sampler_gap_seconds),
    ),
    Metric(
        "loadpeak_hook_errors_total",
        "counter",
        "Hooks of loadpeak that failed; the engine goes on without them.",
        series=_one(lambda r: r.hook_errors),
    ),
)


def shown_layers(rank: RankRecord, layers: str, most: int | None = None) -> Sequence[LayerRecord]:
    """The layers that have series of their own.

    Args:
        rank: whose layers.
        layers: the setting ``LOADPEAK_LAYERS``.
        most: how many at the most, the first ones.
    """
    if layers == "off":
        return ()
    shown = rank.layers if layers == "all" else [layer for layer in rank.layers if layer.moe]
    return shown[:most]
