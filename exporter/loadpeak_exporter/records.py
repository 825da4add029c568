"""What is known of a run, as frozen structs: everything that shows a run reads these.

Sizes are bytes, times are seconds of the host's monotonic clock unless ``wall`` is in the name. ``None``
means that there was no reading.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadpeak.record import Device, Fix, Header, Memory, Outcome, Phase
from loadpeak_exporter.tail import Damage


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records."""


class PhaseRecord(_Struct, frozen=True):
    """One phase of one rank; a phase that came several times (draft models) is added up."""

    phase: Phase
    started_at_seconds: float
    duration_seconds: float | None = None
    """Of the occurrences that have ended."""
    settings: str | None = None
    """Allocator settings in force when it began last."""
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_used_peak_bytes: int | None = None


class LayerRecord(_Struct, frozen=True):
    """One layer of one rank, over the conversions of its modules; later calls that did nothing are left out.

    ``allocated_bytes`` and ``reserved_bytes`` are read after the layer: after its experts were converted
    for the first time, or after its last module where it has none.
    """

    layer: int
    name: str
    moe: bool
    done: bool
    started_at_seconds: float
    ended_at_seconds: float
    duration_seconds: float
    allocated_before_bytes: int | None = None
    reserved_before_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    released_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None


class FailureRecord(_Struct, frozen=True):
    """Why a startup did not become ready."""

    outcome: Literal["oom", "failed", "killed"]
    reason: str
    """One line: the error's type and first line, or how the process went."""
    message: str | None = None
    """The error's whole text."""
    phase: Phase | None = None


class RankRecord(_Struct, frozen=True):
    """One rank of a run."""

    rank: int
    local_rank: int
    pid: int
    started_at_seconds: float
    started_at_wall_seconds: float
    updated_at_seconds: float
    outcome: Outcome
    phase: Phase
    device: Device | None = None
    failure: FailureRecord | None = None
    phases: tuple[PhaseRecord, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    layers_expected: int | None = None
    layers_done: int = 0
    memory: Memory = Memory()
    """The latest reading of the allocator."""
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None
    device_used_bytes: int | None = None
    device_used_peak_bytes: int | None = None
    headroom_bytes: int | None = None
    """Device total less the highest use since the start."""
    load_peak_bytes: int | None = None
    """Highest device use in the phases up to the KV cache (:data:`loadpeak.record.LOAD_PHASES`)."""
    load_headroom_bytes: int | None = None
    """Device total less ``load_peak_bytes``."""
    ready_allocated_bytes: int | None = None
    ready_at_seconds: float | None = None
    sampler_gap_seconds: float | None = None
    sampler_warning: str | None = None
    hook_errors: int = 0
    fixes: tuple[Fix, ...] = ()
    exporter: str | None = None
    """``host:port`` of the exporter inside the engine."""


class RunRecord(_Struct, frozen=True):
    """One run."""

    header: Header
    outcome: Outcome
    ranks: tuple[RankRecord, ...] = ()
    damage: tuple[Damage, ...] = ()
    exit_code: int | None = None
    """Of the command that ``loadpeak run`` started."""

    @property
    def run(self) -> str:
        """The run's id."""
        return self.header.run


class DamagedRun(_Struct, frozen=True):
    """A folder in the run store that is no readable run."""

    run: str
    damage: tuple[Damage, ...]
