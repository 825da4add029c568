"""Where a startup's peak lies, how far it is from the lowest possible one, and what would help: one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from loadpeak.allocator.replay import LayerFigures
from loadpeak.record import LOAD_PHASES, Phase
from loadpeak.whatif.advice import Growth, cause, locate
from loadpeak_exporter.fold import highest
from loadpeak_exporter.records import LayerRecord, PhaseRecord, RankRecord

LIMIT_RATIO = 1.10
"""A fixed startup should come this close to the lowest possible peak."""
_KINDS = {
    "nowhere": "at the live allocation",
    "unknown": "not known",
    "before": "before the layers",
    "across": "across layers",
    "inside": "inside a layer",
    "after": "after the layers",
}
_ADVICE = {
    "nowhere": "there is nothing to fix",
    "unknown": "nothing can be advised",
    "before": "neither a release per layer nor a setting that acts on layers can help there",
    "across": "a release per layer helps: --release moe-layer",
    "inside": "a release between layers cannot help, another allocator setting may",
    "after": "it is not the conversion that takes the memory",
}


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """How close a rank's load peak is to the lowest possible one.

    ``context_bytes`` is what is in use on the device outside the allocator: device use less reserved memory,
    both at their highest in the phase that has the load peak.
    """

    load_peak_bytes: int
    live_peak_bytes: int
    context_bytes: int

    @property
    def lowest_bytes(self) -> int:
        """Highest live allocation plus context: no startup can do with less."""
        return self.live_peak_bytes + self.context_bytes

    @property
    def ratio(self) -> float:
        """The load peak as a multiple of the lowest."""
        return self.load_peak_bytes / self.lowest_bytes


def distance(rank: RankRecord) -> Distance | None:
    """A rank's distance; nothing without readings of device and allocator."""
    phases = [phase for phase in rank.phases if phase.phase in LOAD_PHASES]
    live = highest(*(phase.allocated_peak_bytes for phase in phases))
    read = [phase for phase in phases if phase.device_used_peak_bytes is not None]
    if rank.device is None or rank.device.kind != "nvml" or live is None or not read:
        return None
    top = max(read, key=lambda phase: phase.device_used_peak_bytes or 0)
    if top.device_used_peak_bytes is None or top.reserved_peak_bytes is None:
        return None
    context = top.device_used_peak_bytes - top.reserved_peak_bytes
    if context < 0:
        return None
    return Distance(load_peak_bytes=top.device_used_peak_bytes, live_peak_bytes=live, context_bytes=context)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's peak lies.

    ``loading``: that is while its weights were still being loaded. ``limited``: a split limit was in force.
    """

    growth: Growth
    loading: bool = False
    limited: bool = False

    @property
    def kind(self) -> str:
        """In few words."""
        return "in weight loading" if self.loading else _KINDS[self.growth.where]

    @property
    def sentence(self) -> str:
        """Where it lies and what helps."""
        reason, advice = cause(self.growth), _ADVICE[self.growth.where]
        if self.growth.where == "inside" and self.limited:
            advice += ", as --split-limit keep"
        if self.growth.where == "unknown":
            reason = "where it grows is not known without layers and readings of the allocator"
        if not self.loading:
            return f"{reason}; {advice}"
        if self.growth.where == "before":
            return "the peak is reached while weights load, outside the conversion of layers; " + advice
        return f"layers are converted while weights load, and {reason}; {advice}"


def place(rank: RankRecord) -> Place:
    """Where a rank's reserved memory rose to its peak, of all that comes before the KV cache."""
    phases = {phase.phase: phase for phase in rank.phases if phase.phase in LOAD_PHASES}
    layers = sorted(rank.layers, key=lambda layer: layer.started_at_seconds)
    before, after = _around(phases, layers)
    windows = [_edge(before, layers[0] if layers else None), *map(_window, layers)]
    if after:
        windows.append(_edge(after))
    known = [window for window in windows if window is not None]
    if len(known) < len(windows):
        return Place(growth=Growth("unknown"))
    growth = locate(known, complete=bool(after))
    if growth.where == "before":
        top = max(before, key=_peak, default=None)
        return Place(growth=growth, loading=top is not None and top.phase == "load_weights")
    if growth.where not in ("across", "inside"):
        return Place(growth=growth)
    loading = _while_loading(max(layers, key=_peak), phases)
    limited = any("max_split_size_mb" in (phase.settings or "") for phase in phases.values())
    return Place(growth=growth, loading=loading, limited=limited)


def _peak(part: LayerRecord | PhaseRecord) -> int:
    return part.reserved_peak_bytes or 0


def _while_loading(layer: LayerRecord, phases: Mapping[Phase, PhaseRecord]) -> bool:
    """Whether a layer was converted inside weight loading, as online quantization does."""
    process = phases.get("process_weights")
    return "load_weights" in phases and (
        process is None or layer.started_at_seconds < process.started_at_seconds
    )


def _around(
    phases: Mapping[Phase, PhaseRecord], layers: Sequence[LayerRecord]
) -> tuple[list[PhaseRecord], list[PhaseRecord]]:
    """The phases before the layers and after them; one with layers in it where its peak is none of theirs."""
    top = max((max(_peak(layer), layer.reserved_before_bytes or 0) for layer in layers), default=0)
    first: tuple[Phase, ...] = ("init_device", "create_model", "load_weights")
    last: tuple[Phase, ...] = ("process_weights", "profile")
    before, after = ([phases[name] for name in names if name in phases] for names in (first, last))
    if layers and _while_loading(layers[0], phases):
        before = [phase for phase in before if phase.phase != "load_weights" or _peak(phase) > top]
    return before, [phase for phase in after if phase.phase != "process_weights" or _peak(phase) > top]


def _edge(phases: Sequence[PhaseRecord], first: LayerRecord | None = None) -> LayerFigures | None:
    """What comes before the first layer, or after the last."""
    allocated = highest(*(phase.allocated_peak_bytes for phase in phases))
    reserved = highest(*(phase.reserved_peak_bytes for phase in phases))
    if first is None:
        return _figures(None, allocated, reserved, allocated, reserved)
    held, kept = first.allocated_before_bytes, first.reserved_before_bytes
    return _figures(None, held, kept, highest(allocated, held), highest(reserved, kept))


def _window(layer: LayerRecord) -> LayerFigures | None:
    return _figures(
        layer.layer,
        layer.allocated_bytes,
        layer.reserved_bytes,
        highest(layer.allocated_peak_bytes, layer.allocated_before_bytes),
        highest(layer.reserved_peak_bytes, layer.reserved_before_bytes),
    )


def _figures(
    layer: int | None,
    allocated: int | None,
    reserved: int | None,
    allocated_peak: int | None,
    reserved_peak: int | None,
) -> LayerFigures | None:
    """A window; nothing where a reading is missing."""
    if allocated is None or reserved is None or allocated_peak is None or reserved_peak is None:
        return None
    return LayerFigures(
        layer=layer,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        allocated_peak_bytes=allocated_peak,
        reserved_peak_bytes=reserved_peak,
    )
