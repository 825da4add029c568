"""Play a recorded startup again: the recorder and the sampler run, fed with the recorded readings.

Nothing is copied from the source but readings, names and durations: phases, peaks, lines and samples are
made anew by :class:`loadpeak.session.Session` and :class:`loadpeak.sampler.loop.Loop`, so a replay goes
through the same code as a real startup. Time may run faster than it did; the record keeps the source's.
"""

from __future__ import annotations

import bisect
import os
import platform
import threading
import time
from pathlib import Path

import msgspec

from loadpeak import run_folder
from loadpeak.journal import Journal
from loadpeak.record import (
    AnyLine,
    Conversion,
    Device,
    DeviceFound,
    Failure,
    Fix,
    Header,
    Memory,
    Model,
    PhaseEnd,
    PhaseStart,
    RankStart,
    Ready,
    Sample,
    SamplerStart,
    decode_header,
    decode_line,
)
from loadpeak.sampler.devices import Source
from loadpeak.sampler.loop import Loop
from loadpeak.session import ConvertedModule, Session

SAMPLE_SECONDS = 0.01


class ScaledClock:
    """This host's monotonic clock from now on, ``speed`` times as fast."""

    def __init__(self, speed: float) -> None:
        self.begun = time.monotonic()
        self._speed = speed

    def __call__(self) -> float:
        """The scaled time."""
        return self.begun + (time.monotonic() - self.begun) * self._speed

    def sleep(self, seconds: float) -> None:
        """Sleep so many scaled seconds."""
        time.sleep(max(0.0, seconds) / self._speed)


class RecordedAllocator:
    """An allocator that reads as the record says."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.conf: str | None = None

    def show(self, memory: Memory, **other: int | None) -> None:
        """From now on readings are these; counts that are not given stay."""
        counts = {"retries": self.memory.retries, "ooms": self.memory.ooms}
        counts |= {name: value for name in counts if (value := getattr(memory, name)) is not None}
        self.memory = msgspec.structs.replace(memory, **{**counts, **other})

    def read(self) -> Memory:
        """The reading that is shown."""
        return self.memory

    def reset_peaks(self) -> None:
        """The window begins anew."""
        self.memory = msgspec.structs.replace(
            self.memory, allocated_peak_bytes=None, reserved_peak_bytes=None
        )

    def settings(self) -> str | None:
        """The settings that are shown."""
        return self.conf

    def release(self) -> None:
        """Nothing: the recorded readings show what a release did."""


class _Rank:
    """One rank's journal and samples, played in step."""

    def __init__(self, source: Path, target: Path, rank: int, clock: ScaledClock) -> None:
        self._lines = _lines(run_folder.journal_path(source, rank))
        self._device_lines = _lines(run_folder.device_path(source, rank))
        self._source_samples = [line for line in self._device_lines if isinstance(line, Sample)]
        self._rank, self._clock = rank, clock
        self._shift = clock.begun - self._lines[0].at_seconds
        self._journal = Journal(run_folder.journal_path(target, rank))
        self._samples = Journal(run_folder.device_path(target, rank))
        self._orders: list[tuple[str, str]] = []
        self._allocator = RecordedAllocator()
        self._session = Session(
            self._allocator,
            self._journal.append,
            lambda phase: self._orders.append(("phase", phase)),
            clock=clock,
            is_out_of_memory=lambda error: type(error).__name__ == "OutOfMemoryError",
        )

    def threads(self) -> list[threading.Thread]:
        """The rank and its sampler, not yet started."""
        return [
            threading.Thread(target=self._play, name=f"replay-rank-{self._rank}", daemon=True),
            threading.Thread(target=self._sample, name=f"replay-device-{self._rank}", daemon=True),
        ]

    # the rank

    def _play(self) -> None:
        now = self._clock()
        self._journal.append(
            RankStart(
                at_seconds=now,
                at_wall_seconds=time.time(),
                rank=self._rank,
                local_rank=self._rank,
                pid=os.getpid(),
            )
        )
        for line in self._lines:
            self._wait_until(line.at_seconds)
            self._step(line)
        self._orders.append(("stop", ""))

    def _step(self, line: AnyLine) -> None:
        session, allocator = self._session, self._allocator
        if isinstance(line, PhaseStart):
            allocator.conf = line.settings
            allocator.show(line.memory)
            session.start_phase(line.phase)
        elif isinstance(line, PhaseEnd):
            allocator.show(
                line.memory,
                allocated_peak_bytes=line.allocated_peak_bytes,
                reserved_peak_bytes=line.reserved_peak_bytes,
            )
            session.end_phase()
        elif isinstance(line, Model):
            session.model(line.layers, line.moe_layers, line.conversions)
        elif isinstance(line, Fix):
            session.fix(line.name, line.value, line.active, line.detail)
        elif isinstance(line, Conversion):
            self._convert(line)
        elif isinstance(line, Ready):
            allocator.show(line.memory)
            session.ready()
        elif isinstance(line, Failure):
            allocator.show(line.memory)
            session.failed(type(line.error, (Exception,), {})(line.message))

    def _convert(self, line: Conversion) -> None:
        session, allocator = self._session, self._allocator
        allocator.show(line.before)
        watch = session.start_conversion()
        self._wait_until(line.at_seconds + line.duration_seconds)
        reserved = line.after.reserved_bytes
        if line.released_bytes is not None and reserved is not None:
            reserved += line.released_bytes
        allocator.show(
            line.after,
            reserved_bytes=reserved,
            allocated_peak_bytes=line.allocated_peak_bytes,
            reserved_peak_bytes=line.reserved_peak_bytes,
            retries=_sum(allocator.memory.retries, line.retries),
            ooms=_sum(allocator.memory.ooms, line.ooms),
        )

        def release(module: ConvertedModule, memory: Memory) -> bool:
            allocator.show(line.after)
            return line.released_bytes is not None

        session.after_conversion[:] = [release]
        session.end_conversion(
            watch,
            name=line.name,
            method=line.method,
            moe=line.moe,
            layer=line.layer,
            layer_done=line.layer_done,
            failed=line.failed,
        )

    def _wait_until(self, source_seconds: float) -> None:
        self._clock.sleep(source_seconds + self._shift - self._clock())

    # the sampler

    def _sample(self) -> None:
        self._samples.append(
            SamplerStart(
                at_seconds=self._clock(),
                at_wall_seconds=time.time(),
                rank=self._rank,
                interval_seconds=SAMPLE_SECONDS,
                pid=os.getpid(),
            )
        )
        device = next((line.device for line in self._device_lines if isinstance(line, DeviceFound)), None)
        if device is not None:
            self._orders.insert(0, ("device", device.uuid or ""))
            Loop(
                _Told(self._orders),
                _OneDevice(device, self._used),
                self._samples.append,
                self._clock,
                self._clock.sleep,
                SAMPLE_SECONDS,
            ).run()

    def _used(self) -> int | None:
        """Use of the device at this moment of the source: the last sample written before it."""
        samples = self._source_samples
        at = self._clock() - self._shift
        place = bisect.bisect_right(samples, at, key=lambda sample: sample.at_seconds)
        return samples[max(0, place - 1)].used_bytes


class _Told:
    """The rank as the sampler sees it: orders from a list, alive until told to stop."""

    def __init__(self, orders: list[tuple[str, str]]) -> None:
        self._orders = orders

    def orders(self) -> list[tuple[str, str]]:
        taken = self._orders[:]
        del self._orders[: len(taken)]
        return taken

    def alive(self) -> bool:
        return True

    def ending(self) -> tuple[int | None, int | None]:
        return None, None


class _OneDevice:
    """The recorded device, whatever its kind."""

    def __init__(self, device: Device, read: Source) -> None:
        self._device, self._read = device, read

    def candidates(self) -> dict[str, tuple[Device, Source]]:
        return {}

    def find(self, uuid: str) -> tuple[Device, Source]:
        return self._device, self._read

    def resident(self) -> tuple[Device, Source]:
        return self._device, self._read


def start(source: Path, home: Path, run: str, speed: float) -> list[threading.Thread]:
    """Begin to replay a recorded run into a run store, in threads of this process.

    Args:
        source: the folder of the recorded run.
        home: run store to write into.
        run: id of the new run.
        speed: how many times faster than it was.

    Returns:
        The threads; the replay is over when all have ended.
    """
    folder = home / run_folder.RUNS / run
    folder.mkdir(parents=True)
    header = decode_header((source / run_folder.HEADER).read_bytes())
    run_folder.write_header(folder, _renewed(header, run))
    clock = ScaledClock(speed)
    ranks = sorted(int(path.stem.partition("-")[2]) for path in source.glob("rank-*.jsonl"))
    threads = [thread for rank in ranks for thread in _Rank(source, folder, rank, clock).threads()]
    for thread in threads:
        thread.start()
    return threads


def _renewed(header: Header, run: str) -> Header:
    """The header of a replay: the source's facts, this process's whereabouts."""
    boot_id, pid_namespace = run_folder.whereabouts()
    return msgspec.structs.replace(
        header,
        run=run,
        created_at_wall_seconds=time.time(),
        hostname=platform.node(),
        boot_id=boot_id,
        pid_namespace=pid_namespace,
    )


def _lines(path: Path) -> list[AnyLine]:
    return [decode_line(line) for line in path.read_bytes().splitlines()]


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None else first + (second or 0)
