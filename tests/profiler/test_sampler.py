"""The sampling loop on made-up devices, and the real process beside a real rank."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadpeak.journal import Journal
from loadpeak.record import (
    AnyLine,
    Device,
    DeviceFound,
    RankEnd,
    Sample,
    SamplerStart,
    SamplerWarning,
    decode_line,
)
from loadpeak.sampler.__main__ import _append
from loadpeak.sampler.devices import Nvml, Source, resident
from loadpeak.sampler.loop import Loop
from loadpeak.sampler.process import SamplerProcess
from tests.fakes import FakeClock, Lines

GPU = Device(kind="nvml", name="V100", uuid="GPU-a", index=0, total_bytes=32 << 30)
OTHER = Device(kind="nvml", name="V100", uuid="GPU-b", index=1, total_bytes=32 << 30)


class Script:
    """A rank and its devices whose state is a function of the sample number."""

    def __init__(
        self,
        used: Callable[[int], int | None],
        orders: dict[int, list[tuple[str, str]]],
        ends_at: int | None = None,
        ending: tuple[int | None, int | None] = (None, 9),
        candidates: tuple[Device, ...] = (GPU, OTHER),
    ) -> None:
        self.turn = -1
        self._used, self._orders, self._ends_at, self._ending = used, orders, ends_at, ending
        self._candidates = candidates

    def orders(self) -> list[tuple[str, str]]:
        return self._orders.get(self.turn, [])

    def alive(self) -> bool:
        self.turn += 1
        return self._ends_at is None or self.turn < self._ends_at

    def ending(self) -> tuple[int | None, int | None]:
        return self._ending

    def candidates(self) -> dict[str, tuple[Device, Source]]:
        return {str(device.uuid): (device, self._source(device)) for device in self._candidates}

    def find(self, uuid: str) -> tuple[Device, Source]:
        if uuid != GPU.uuid:
            raise LookupError(f"NVML cannot read {uuid}: not supported")
        return GPU, self._source(GPU)

    def resident(self) -> tuple[Device, Source]:
        device = Device(kind="resident", name="resident memory of the process")
        return device, self._source(device)

    def _source(self, device: Device) -> Source:
        return lambda: 1 if device is OTHER else self._used(self.turn)


def run(script: Script, interval: float = 0.01, clock: FakeClock | None = None) -> Lines:
    lines = Lines()
    clock = clock or FakeClock()
    Loop(script, script, lines.append, clock, clock.sleep, interval).run()
    return lines


STOP = {50: [("stop", "")]}
NAMED = {0: [("device", "GPU-a")], **STOP}


def test_only_samples_that_change_something_are_written() -> None:
    lines = run(Script(lambda turn: 100 if turn < 20 else 200, NAMED))
    used = [sample.used_bytes for sample in lines.of(Sample)]
    assert used == [100, 100, 200], "the second 100 carries the first gap"


def test_sign_of_life_comes_once_a_second() -> None:
    lines = run(Script(lambda turn: 100, {0: [("device", "GPU-a")], 501: [("stop", "")]}))
    times = [sample.at_seconds for sample in lines.of(Sample)]
    assert len(times) < 10
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.02


def test_peak_between_two_written_samples_is_kept() -> None:
    lines = run(Script(lambda turn: 900 if turn == 7 else 100, NAMED))
    assert max(sample.phase_peak_bytes or 0 for sample in lines.of(Sample)) == 900


def test_each_phase_has_its_own_running_peak() -> None:
    orders = {0: [("device", "GPU-a")], 10: [("phase", "load_weights")], **STOP}
    lines = run(Script(lambda turn: 900 if turn == 5 else 100, orders))
    peaks = {sample.phase: sample.phase_peak_bytes for sample in lines.of(Sample)}
    assert peaks == {"init_device": 900, "load_weights": 100}


def test_samples_from_before_the_device_was_named_are_kept() -> None:
    """CUDA tells its device only once it is in use; the start of the startup must not be lost."""
    orders = {30: [("device", "GPU-a")], **STOP}
    lines = run(Script(lambda turn: 700 if turn == 3 else 100, orders))
    assert lines.one(DeviceFound).device == GPU
    assert 700 in [sample.used_bytes for sample in lines.of(Sample)]


def test_longest_gap_is_recorded_when_the_sampler_itself_was_late() -> None:
    clock = FakeClock()

    def used(turn: int) -> int:
        if turn == 10:
            clock.now += 0.25
        return 100

    lines = run(Script(used, NAMED), clock=clock)
    assert lines.of(Sample)[-1].gap_seconds == pytest.approx(0.25, abs=0.02)


def test_failing_reads_are_missing_and_warned_of_once() -> None:
    lines = run(Script(lambda turn: 100 if turn < 10 or turn % 2 else None, NAMED))
    assert None in [sample.used_bytes for sample in lines.of(Sample)]
    assert 0 not in [sample.used_bytes for sample in lines.of(Sample)]
    assert len(lines.of(SamplerWarning)) == 1


def test_device_that_cannot_be_read_gives_one_warning_and_no_sample() -> None:
    lines = run(Script(lambda turn: 100, {0: [("device", "MIG-x")], **STOP}))
    assert "MIG-x" in lines.one(SamplerWarning).message
    assert not lines.of(Sample)


def test_without_a_gpu_resident_memory_stands_in_and_says_so() -> None:
    lines = run(Script(lambda turn: 5, {0: [("resident", "")], **STOP}, candidates=()))
    assert lines.one(DeviceFound).device.kind == "resident"
    assert lines.one(DeviceFound).device.total_bytes is None
    assert lines.of(Sample)[0].used_bytes == 5


def test_memory_that_an_ending_process_gave_back_is_no_reading() -> None:
    script = Script(lambda turn: 5 if turn < 9 else None, {0: [("resident", "")]}, ends_at=12, candidates=())
    lines = run(script)
    assert [sample.used_bytes for sample in lines.of(Sample)][-1] == 5
    assert not lines.of(SamplerWarning)


def test_end_of_the_rank_is_recorded_with_what_is_known_of_it() -> None:
    lines = run(Script(lambda turn: 100, {0: [("device", "GPU-a")]}, ends_at=5))
    assert lines.one(RankEnd).signal == 9


def test_rank_that_dies_before_it_names_a_device_keeps_its_samples_if_there_is_one_gpu() -> None:
    lines = run(Script(lambda turn: 100, {}, ends_at=5, candidates=(GPU,)))
    assert lines.one(DeviceFound).device == GPU
    assert not run(Script(lambda turn: 100, {}, ends_at=5)).of(Sample), "two GPUs: no guess"


# ── NVML ──────────────────────────────────────────────────────────────────────────────────────────


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of pynvml as is used: two GPUs, the second split into MIG devices."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 2
    memory_fails = False
    knows_v2 = True

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-0", "GPU-1", "MIG-1a"):
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "GPU-0":
            raise NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 0

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"Tesla V100"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        if self.memory_fails or (version is not None and not self.knows_v2):
            raise NVMLError("No permission")
        if version is None:
            return SimpleNamespace(used=9, total=36)
        return SimpleNamespace(used=7, total=36, reserved=2)


def test_nvml_device_is_found_by_uuid() -> None:
    device, read = Nvml(FakeNvml()).by_uuid("GPU-0")
    assert (device.name, device.total_bytes, read()) == ("Tesla V100", 34, 7)
    assert [found.uuid for found, _ in Nvml(FakeNvml()).all()] == ["GPU-0", "GPU-1"]


def test_what_the_driver_keeps_for_itself_is_neither_used_nor_to_be_had() -> None:
    device, read = Nvml(FakeNvml()).by_uuid("GPU-0")
    assert (device.total_bytes, read()) == (34, 7)
    old = FakeNvml()
    old.knows_v2 = False
    device, read = Nvml(old).by_uuid("GPU-0")
    assert (device.total_bytes, read()) == (36, 9), "what is free is the same"


def test_split_gpu_is_not_read_in_place_of_its_mig_device() -> None:
    with pytest.raises(LookupError, match="split into MIG devices"):
        Nvml(FakeNvml()).by_uuid("GPU-1")
    assert Nvml(FakeNvml()).by_uuid("MIG-1a")[1]() == 7


def test_nvml_that_does_not_tell_memory_is_an_absent_reading() -> None:
    library = FakeNvml()
    library.memory_fails = True
    with pytest.raises(LookupError, match="does not tell its memory"):
        Nvml(library).by_uuid("GPU-0")
    assert [device.total_bytes for device, _ in Nvml(library).all()] == [None, None]


def test_resident_memory_of_a_process_that_is_gone_is_missing(tmp_path: Path) -> None:
    assert resident(1, tmp_path)[1]() is None
    assert (resident(os.getpid())[1]() or 0) > 1 << 20


# ── the process ───────────────────────────────────────────────────────────────────────────────────

RANK = """
import sys, time
from pathlib import Path
from loadpeak.sampler.process import SamplerProcess
sampler = SamplerProcess(Path(sys.argv[1]), 0, 0.01)
print(sampler.pid, flush=True)
sampler.device(None)
sampler.phase("load_weights")
exec(sys.argv[2])
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, str(tmp_path / "device-0.jsonl"), body]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def lines_of(path: Path) -> list[AnyLine]:
    return [decode_line(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def samples(path: Path) -> list[Sample]:
    return [line for line in lines_of(path) if isinstance(line, Sample) and line.phase == "load_weights"]


def test_sampler_outlives_a_killed_rank_and_records_the_signal(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "device-0.jsonl"
    process = rank("time.sleep(60)")
    wait_for(lambda: samples(path))
    process.send_signal(signal.SIGKILL)
    wait_for(lambda: isinstance(lines_of(path)[-1], RankEnd))
    end = lines_of(path)[-1]
    assert isinstance(end, RankEnd)
    assert end.signal == signal.SIGKILL, "the rank was a zombie until now: nobody had waited for it"
    assert isinstance(lines_of(path)[0], SamplerStart)


def test_sampler_sees_memory_while_the_interpreter_lock_is_held(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A regular expression that backtracks holds the lock for its whole run."""
    path = tmp_path / "device-0.jsonl"
    process = rank(
        "import re\ntime.sleep(0.3)\nblob = bytearray(64 << 20)\n"
        "re.match(r'(a+)+$', 'a' * 25 + 'b')\nsampler.stop()"
    )
    assert process.wait(60) == 0
    gap = samples(path)[-1].gap_seconds
    assert gap is not None
    assert gap < 0.1, "the lock was held for longer than that"
    peak = max(sample.used_bytes or 0 for sample in samples(path))
    assert peak - (samples(path)[0].used_bytes or 0) > 32 << 20


def test_rank_goes_on_when_its_sampler_is_killed(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    body = """
import os, signal
time.sleep(0.3)
os.kill(sampler.pid, signal.SIGKILL)
time.sleep(0.1)
try:
    sampler.phase("profile")
except ChildProcessError as error:
    print(error, flush=True)
sampler.stop()
"""
    process = rank(body)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "the device sampler ended with -9" in output


def test_sampler_that_is_told_to_stop_is_gone(tmp_path: Path) -> None:
    sampler = SamplerProcess(tmp_path / "device-0.jsonl", 0, 0.01)
    sampler.device(None)
    assert not sampler.ended(0)
    sampler.stop()
    assert sampler.ended(10)
    assert not Path(f"/proc/{sampler.pid}").exists()


def test_samples_that_were_lost_are_told_as_soon_as_lines_can_be_written(tmp_path: Path) -> None:
    """A disk that is full for two samples, and then has room again."""
    journal = Journal(tmp_path / "device-0.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for at in (1.0, 2.0):
            _append(journal, Sample(at_seconds=at, phase="load_weights", used_bytes=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for at in (3.0, 4.0):
        _append(journal, Sample(at_seconds=at, phase="load_weights", used_bytes=1))
    warning, *samples = lines_of(journal.path)
    assert isinstance(warning, SamplerWarning)
    assert "2 samples were lost" in warning.message
    assert [sample.at_seconds for sample in samples] == [3.0, 4.0]
