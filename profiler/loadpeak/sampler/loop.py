"""The sampling loop: read at a fixed interval, write what changes something, end with the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loadpeak.record import Device, DeviceFound, Line, Phase, RankEnd, Sample, SamplerWarning
from loadpeak.sampler.devices import Source

SIGN_OF_LIFE_SECONDS = 1.0
"""An unchanged reading is written this often, so that a reader can tell quiet from dead."""


class Rank(Protocol):
    """What the loop sees of its rank."""

    def orders(self) -> list[tuple[str, str]]:
        """Orders that have come since the last call, oldest first."""

    def alive(self) -> bool:
        """Whether the rank's process still runs."""

    def ending(self) -> tuple[int | None, int | None]:
        """Exit code and signal of the ended rank, as far as they can still be read."""


class Devices(Protocol):
    """Where the loop finds a device by its UUID, or all of them."""

    def find(self, uuid: str) -> tuple[Device, Source]:
        """One device; raises LookupError with the reason if it cannot be read."""

    def candidates(self) -> dict[str, tuple[Device, Source]]:
        """Every device the rank may turn out to use, by UUID."""

    def resident(self) -> tuple[Device, Source]:
        """The stand-in where there is no GPU."""


class Loop:
    """Samples one device for one rank.

    Until the rank has said which device it uses, all candidates are read and their samples kept;
    once it is known, those of that device are written.

    Orders are ``("phase", name)``, ``("device", uuid)``, ``("resident", "")`` and ``("stop", "")``.
    """

    def __init__(
        self,
        rank: Rank,
        devices: Devices,
        write: Callable[[Line], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        interval_seconds: float,
    ) -> None:
        self._rank, self._devices, self._write = rank, devices, write
        self._clock, self._sleep, self._interval = clock, sleep, interval_seconds
        self._phase: Phase = "init_device"
        self._known: _Track | None = None
        self._warned = False
        self._stopped = False
        self._tracks: dict[str, _Track] = {}

    def run(self) -> None:
        """Sample until told to stop, or until the rank is gone."""
        self._tracks = {
            uuid: _Track(read, device) for uuid, (device, read) in self._devices.candidates().items()
        }
        due = self._clock()
        while True:
            alive = self._rank.alive()
            for order, argument in self._rank.orders():
                self._obey(order, argument)
            if alive:
                self._sample()
            if self._stopped:
                self._assume()
                return
            if not alive:
                exit_code, signal = self._rank.ending()
                self._assume()
                self._write(RankEnd(at_seconds=self._clock(), exit_code=exit_code, signal=signal))
                return
            now = self._clock()
            due = max(due + self._interval, now)
            self._sleep(due - now)

    def _obey(self, order: str, argument: str) -> None:
        if order == "stop":
            self._stopped = True
        elif order == "phase":
            self._phase = argument  # type: ignore[assignment]
            for track in self._tracks.values():
                track.begin_phase()
        elif order == "device" and self._known is None:
            try:
                device, read = self._devices.find(argument)
            except LookupError as error:
                self._warn(str(error))
                self._tracks = {}
                return
            self._settle(self._tracks.get(argument) or _Track(read, device))
        elif order == "resident" and self._known is None:
            device, read = self._devices.resident()
            self._settle(_Track(read, device))

    def _settle(self, track: _Track) -> None:
        """This is the device: write what was kept of it and forget the others."""
        self._known = track
        self._tracks = {"": track}
        self._write(DeviceFound(at_seconds=self._clock(), device=track.device))
        for sample in track.kept:
            self._write(sample)
        track.kept.clear()

    def _assume(self) -> None:
        """The rank ended before it named its device: with one candidate there is no doubt."""
        if self._known is None and len(self._tracks) == 1:
            self._settle(next(iter(self._tracks.values())))

    def _sample(self) -> None:
        for track in self._tracks.values():
            now = self._clock()
            sample = track.take(now, self._phase)
            if sample is None:
                continue
            if sample.used_bytes is None:
                if track.device.kind == "resident":
                    continue  # the process is ending: its memory goes first
                self._warn(
                    f"{track.device.name} stopped telling its memory; readings are missing from here on"
                )
            if track is self._known:
                self._write(sample)
            else:
                track.kept.append(sample)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._write(SamplerWarning(at_seconds=self._clock(), message=message))


class _Track:
    """The samples of one device."""

    def __init__(self, read: Source, device: Device) -> None:
        self.device = device
        self.kept: list[Sample] = []
        self._read = read
        self._last_seconds: float | None = None
        self._gap = 0.0
        self._used: int | None = None
        self._peak: int | None = None
        self._fresh = True
        self._written_seconds = float("-inf")

    def begin_phase(self) -> None:
        self._peak = None
        self._fresh = True

    def take(self, now: float, phase: Phase) -> Sample | None:
        """Read; the sample if it has to be written."""
        used = self._read()
        changed = self._fresh or used != self._used
        if self._last_seconds is not None and now - self._last_seconds > self._gap:
            self._gap = round(now - self._last_seconds, 6)
            changed = True
        self._last_seconds = now
        self._used = used
        if used is not None:
            self._peak = used if self._peak is None else max(self._peak, used)
        if not changed and now - self._written_seconds < SIGN_OF_LIFE_SECONDS:
            return None
        self._fresh = False
        self._written_seconds = now
        return Sample(
            at_seconds=now,
            phase=phase,
            used_bytes=used,
            phase_peak_bytes=self._peak,
            gap_seconds=self._gap or None,
        )
