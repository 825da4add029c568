"""Fold the lines of one rank into what is known of it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadpeak.record import (
    LOAD_PHASES,
    AnyLine,
    Conversion,
    Device,
    DeviceFound,
    EngineSettings,
    Exit,
    Exporter,
    Failure,
    Fix,
    HookError,
    Memory,
    Model,
    Outcome,
    Phase,
    PhaseEnd,
    PhaseStart,
    RankEnd,
    RankStart,
    Ready,
    Sample,
    SamplerWarning,
    WeightHashes,
    WeightsHashed,
)
from loadpeak_exporter.history import History
from loadpeak_exporter.records import FailureRecord, LayerRecord, PhaseRecord, RankRecord

SETTLED_SECONDS = 0.1
"""Samples come this much later than the conversion they belong to, at most."""
SILENCE_SECONDS = 2.0
"""A sampler gives a sign of life each second; after this much silence it counts as gone."""


def highest(*values: int | None) -> int | None:
    """The highest value that is there."""
    return max((value for value in values if value is not None), default=None)


def total(*values: int | None) -> int | None:
    """The sum of the values that are there."""
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def _left(total_bytes: int | None, used_bytes: int | None) -> int | None:
    return None if total_bytes is None or used_bytes is None else total_bytes - used_bytes


@dataclass
class _Phase:
    started: float
    duration: float | None = None
    settings: str | None = None
    allocated_peak: int | None = None
    reserved_peak: int | None = None


@dataclass
class _Layer:
    conversions: list[Conversion] = field(default_factory=list)
    done: bool = False
    settled: LayerRecord | None = None


class RankFold:
    """The state of one rank; lines go in through :meth:`feed`, :meth:`record` shows it."""

    def __init__(self) -> None:
        self.start: RankStart | None = None
        self._phase: Phase = "init_device"
        self._phases: dict[Phase, _Phase] = {}
        self._layers: dict[int, _Layer] = {}
        self._expected: set[int] | None = None
        self._memory = Memory()
        self._allocated_peak: int | None = None
        self._reserved_peak: int | None = None
        self._counts: dict[str, int | None] = {"retries": None, "ooms": None}
        self._failure: FailureRecord | None = None
        self._ready: Ready | None = None
        self._served = False
        self._hook_errors = 0
        self._fixes: dict[str, Fix] = {}
        self._exporter: str | None = None
        self._device: Device | None = None
        self._device_peaks: dict[Phase, int] = {}
        self._gap: float | None = None
        self._warning: str | None = None
        self._updated = 0.0
        self._sampler_done = False
        self.history = History()

    def feed(self, line: AnyLine) -> None:
        """One more line, from the journal or from the samples of this rank."""
        if isinstance(line, Sample):
            self._sample(line)
            return
        if isinstance(line, EngineSettings | WeightHashes | WeightsHashed):
            return  # taken when the startup is over: the silence of its sampler is none
        self._updated = max(self._updated, line.at_seconds)
        if isinstance(line, Conversion):
            self._conversion(line)
        elif isinstance(line, PhaseStart):
            self._phase = line.phase
            phase = self._phases.setdefault(line.phase, _Phase(line.at_seconds))
            phase.settings = line.settings
            self.history.begin(line.phase, line.at_seconds)
            self._read(line.memory, line.at_seconds)
        elif isinstance(line, PhaseEnd):
            self._phase_end(line)
        elif isinstance(line, Model):
            self._expected = (self._expected or set()) | set(line.layers)
        elif isinstance(line, RankStart):
            self.start = line
        elif isinstance(line, DeviceFound):
            self._device = line.device
        elif isinstance(line, Ready):
            self._phase, self._ready, self._served = "ready", line, True
            self._read(line.memory, line.at_seconds)
        elif isinstance(line, Failure):
            first = (line.message.strip().splitlines() or [""])[0]
            self._fail(line.outcome, f"{line.error}: {first}".rstrip(": "), line.message, line.phase)
            self._read(line.memory, line.at_seconds)
        elif isinstance(line, Exit):
            self._fail("failed", "the process ended before the engine was ready")
        elif isinstance(line, RankEnd):
            self._sampler_done = True
            self._fail("killed", _ending(line))
        elif isinstance(line, HookError):
            self._hook_errors = max(self._hook_errors, line.count)
        elif isinstance(line, Fix):
            self._fixes[line.name] = line
        elif isinstance(line, Exporter):
            self._exporter = f"{line.host}:{line.port}"
        elif isinstance(line, SamplerWarning):
            self._warning = line.message

    @property
    def outcome(self) -> Outcome:
        """What the lines say; whether a rank that says ``loading`` still lives is for others to find out."""
        return "ready" if self._served else self._failure.outcome if self._failure else "loading"

    def record(self, now_seconds: float | None, gone: str | None = None) -> RankRecord | None:
        """What is known; nothing before the journal's first line.

        Args:
            now_seconds: this host's monotonic clock, if the record is of this host's boot.
            gone: why a rank that says ``loading`` is taken to be dead, if it is.
        """
        if self.start is None:
            return None
        failure = self._failure
        if gone is not None and self.outcome == "loading":
            failure = FailureRecord(outcome="killed", reason=gone, phase=self._phase)
        used_peak = highest(*self._device_peaks.values())
        load_peak = highest(*(self._device_peaks.get(phase) for phase in LOAD_PHASES))
        device_total = self._device.total_bytes if self._device else None
        return RankRecord(
            rank=self.start.rank,
            local_rank=self.start.local_rank,
            pid=self.start.pid,
            started_at_seconds=self.start.at_seconds,
            started_at_wall_seconds=self.start.at_wall_seconds,
            updated_at_seconds=max([self._updated, *self.history.device_times[-1:]]),
            outcome="ready" if self._served else failure.outcome if failure else "loading",
            phase=self._phase,
            device=self._device,
            failure=None if self._served else failure,
            phases=tuple(self._phase_record(phase, state) for phase, state in self._phases.items()),
            layers=tuple(self._layer_record(layer) for layer in sorted(self._layers)),
            layers_expected=None if self._expected is None else len(self._expected),
            layers_done=sum(layer.done for layer in self._layers.values()),
            memory=self._memory,
            allocated_peak_bytes=self._allocated_peak,
            reserved_peak_bytes=self._reserved_peak,
            retries=self._counts["retries"],
            ooms=self._counts["ooms"],
            device_used_bytes=self.history.device_values[-1] if self.history.device_values else None,
            device_used_peak_bytes=used_peak,
            headroom_bytes=_left(device_total, used_peak),
            load_peak_bytes=load_peak,
            load_headroom_bytes=_left(device_total, load_peak),
            ready_allocated_bytes=self._ready.memory.allocated_bytes if self._ready else None,
            ready_at_seconds=self._ready.at_seconds if self._ready else None,
            sampler_gap_seconds=self._longest_gap(now_seconds),
            sampler_warning=self._warning,
            hook_errors=self._hook_errors,
            fixes=tuple(self._fixes.values()),
            exporter=self._exporter,
        )

    # ── what each kind of line changes ────────────────────────────────────────────────────────────

    def _read(self, memory: Memory, at_seconds: float) -> None:
        self._memory = memory
        self.history.allocator(at_seconds, memory.allocated_bytes, memory.reserved_bytes)
        self._peaks(memory.allocated_peak_bytes, memory.reserved_peak_bytes)
        self._peaks(memory.allocated_bytes, memory.reserved_bytes)
        for name in self._counts:
            self._counts[name] = highest(self._counts[name], getattr(memory, name))

    def _peaks(self, allocated: int | None, reserved: int | None) -> None:
        self._allocated_peak = highest(self._allocated_peak, allocated)
        self._reserved_peak = highest(self._reserved_peak, reserved)

    def _phase_end(self, line: PhaseEnd) -> None:
        phase = self._phases.setdefault(line.phase, _Phase(line.at_seconds - line.duration_seconds))
        phase.duration = (phase.duration or 0.0) + line.duration_seconds
        phase.allocated_peak = highest(phase.allocated_peak, line.allocated_peak_bytes)
        phase.reserved_peak = highest(phase.reserved_peak, line.reserved_peak_bytes)
        self._read(line.memory, line.at_seconds)
        self.history.end(line.at_seconds)
        self._peaks(line.allocated_peak_bytes, line.reserved_peak_bytes)

    def _conversion(self, line: Conversion) -> None:
        ended = line.at_seconds + line.duration_seconds
        self._updated = max(self._updated, ended)
        self._memory = line.after
        self.history.allocator(line.at_seconds, line.before.allocated_bytes, line.before.reserved_bytes)
        middle = (line.at_seconds + ended) / 2
        self.history.allocator(middle, line.allocated_peak_bytes, line.reserved_peak_bytes)
        self.history.allocator(ended, line.after.allocated_bytes, line.after.reserved_bytes)
        self._peaks(line.allocated_peak_bytes, line.reserved_peak_bytes)
        for name in self._counts:
            self._counts[name] = total(self._counts[name], getattr(line, name))
        phase = self._phases.get(line.phase)
        if phase is not None:
            phase.allocated_peak = highest(phase.allocated_peak, line.allocated_peak_bytes)
            phase.reserved_peak = highest(phase.reserved_peak, line.reserved_peak_bytes)
        if line.layer is not None:
            layer = self._layers.setdefault(line.layer, _Layer())
            layer.conversions.append(line)
            layer.done = layer.done or line.layer_done
            layer.settled = None

    def _sample(self, line: Sample) -> None:
        self.history.device_times.append(line.at_seconds)
        self.history.device_values.append(line.used_bytes)
        if line.phase == "ready":
            # The sampler is told so when the engine is: it stands for a Ready that found the disk full.
            self._phase, self._served = "ready", True
        peak = highest(line.used_bytes, line.phase_peak_bytes)
        if peak is not None:
            self._device_peaks[line.phase] = max(peak, self._device_peaks.get(line.phase, 0))
        if line.gap_seconds is not None:
            self._gap = max(line.gap_seconds, self._gap or 0.0)

    def _fail(
        self, outcome: Outcome, reason: str, message: str | None = None, phase: Phase | None = None
    ) -> None:
        if self._failure is None:
            self._failure = FailureRecord(
                outcome=outcome,  # type: ignore[arg-type]
                reason=reason,
                message=message,
                phase=phase or self._phase,
            )

    # ── what is derived ───────────────────────────────────────────────────────────────────────────

    def _phase_record(self, phase: Phase, state: _Phase) -> PhaseRecord:
        return PhaseRecord(
            phase=phase,
            started_at_seconds=state.started,
            duration_seconds=state.duration,
            settings=state.settings,
            allocated_peak_bytes=state.allocated_peak,
            reserved_peak_bytes=state.reserved_peak,
            device_used_peak_bytes=self._device_peaks.get(phase),
        )

    def _layer_record(self, number: int) -> LayerRecord:
        layer = self._layers[number]
        if layer.settled is not None:
            return layer.settled
        every = layer.conversions
        conversions = _at_work(every)
        first, last = conversions[0], conversions[-1]
        experts = [line for line in conversions if line.moe]
        after = (experts[0] if experts else last).after
        record = LayerRecord(
            layer=number,
            name=(experts[0] if experts else first).name,
            moe=bool(experts),
            done=layer.done,
            started_at_seconds=first.at_seconds,
            ended_at_seconds=last.at_seconds + last.duration_seconds,
            duration_seconds=round(sum(line.duration_seconds for line in every), 6),
            allocated_before_bytes=first.before.allocated_bytes,
            reserved_before_bytes=first.before.reserved_bytes,
            allocated_bytes=after.allocated_bytes,
            reserved_bytes=after.reserved_bytes,
            allocated_peak_bytes=highest(*(line.allocated_peak_bytes for line in conversions)),
            reserved_peak_bytes=highest(*(line.reserved_peak_bytes for line in conversions)),
            device_peak_bytes=highest(*(self._device_peak_during(line) for line in conversions)),
            released_bytes=total(*(line.released_bytes for line in every)),
            retries=total(*(line.retries for line in every)),
            ooms=total(*(line.ooms for line in every)),
        )
        if (
            self.history.device_times
            and self.history.device_times[-1] > record.ended_at_seconds + SETTLED_SECONDS
        ):
            layer.settled = record
        return record

    def _device_peak_during(self, line: Conversion) -> int | None:
        """Highest device use in force between a conversion's start and end."""
        times = self.history.device_times
        begin = max(0, bisect.bisect_right(times, line.at_seconds) - 1)
        end = bisect.bisect_right(times, line.at_seconds + line.duration_seconds)
        return highest(*self.history.device_values[begin:end]) if end else None

    def _longest_gap(self, now_seconds: float | None) -> float | None:
        """The longest time between two samples, the silence of a sampler that is gone included."""
        if not self.history.device_times:
            return self._gap
        until = self._updated
        if self.outcome == "loading" and now_seconds is not None:
            until = max(until, now_seconds)
        silence = until - self.history.device_times[-1]
        if silence > SILENCE_SECONDS and not self._sampler_done:
            return max(round(silence, 3), self._gap or 0.0)
        return self._gap


def _at_work(conversions: Sequence[Conversion]) -> Sequence[Conversion]:
    """Those of the phase that converts a layer's experts, or else its first module; others that took memory.

    vLLM asks every module again after its weights are loaded, even what online quantization has converted by
    then; such a call returns at once, and what is reserved at that time is not the layer's doing.
    """
    phase = next((line for line in conversions if line.moe), conversions[0]).phase
    return [
        line
        for line in conversions
        if line.phase == phase or (line.reserved_peak_bytes or 0) > (line.before.reserved_bytes or 0)
    ]


def _ending(line: RankEnd) -> str:
    if line.signal is not None:
        return f"the process was ended by signal {line.signal}"
    if line.exit_code is not None:
        return f"the process ended with exit code {line.exit_code} before the engine was ready"
    return "the process was gone before the engine was ready"
