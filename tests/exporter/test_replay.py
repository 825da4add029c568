"""A replay makes the same record again, through the recorder and the sampler."""

from pathlib import Path

import msgspec

from loadpeak import run_folder
from loadpeak.journal import Journal
from loadpeak.record import (
    Conversion,
    Device,
    DeviceFound,
    Line,
    Memory,
    PhaseEnd,
    RankStart,
    Ready,
    Sample,
    SamplerStart,
    decode_line,
)
from loadpeak.session import Session
from loadpeak_exporter import replay
from loadpeak_patches.policies import parse
from loadpeak_patches.release import CacheRelease
from tests.fakes import FakeAllocator, FakeClock, MiB
from tests.profiler.test_record_files import header

GPU = Device(kind="nvml", name="V100", uuid="GPU-a", index=0, total_bytes=32 << 30)


def record(home: Path, release: str = "moe-layer") -> Path:
    """A recorded startup of two layers, with a release after each."""
    folder = home / "runs" / "source"
    folder.mkdir(parents=True)
    run_folder.write_header(folder, header("source"))
    journal = Journal(run_folder.journal_path(folder, 0))
    samples = Journal(run_folder.device_path(folder, 0))
    clock, allocator = FakeClock(5000.0, step=0.001), FakeAllocator()
    journal.append(RankStart(at_seconds=clock(), at_wall_seconds=1.0, rank=0, local_rank=0, pid=1))
    samples.append(
        SamplerStart(at_seconds=clock(), at_wall_seconds=1.0, rank=0, interval_seconds=0.01, pid=2)
    )
    samples.append(DeviceFound(at_seconds=clock(), device=GPU))
    session = Session(allocator, journal.append, clock=clock)
    CacheRelease(session, parse(release)).apply()

    def sample(phase: str) -> None:
        used = allocator.reserved + 500 * MiB
        samples.append(Sample(at_seconds=clock(), phase=phase, used_bytes=used, phase_peak_bytes=used))  # type: ignore[arg-type]

    with session.recording("load_weights"):
        allocator.allocate(100 * MiB)
        sample("load_weights")
        clock.sleep(0.2)
    with session.recording("process_weights"):
        session.model([0, 1], [0, 1], 2)
        for layer in (0, 1):
            watch = session.start_conversion()
            allocator.hoard(30 * MiB)
            allocator.retries += layer
            clock.sleep(0.1)
            sample("process_weights")
            session.end_conversion(
                watch, name=f"l.{layer}", method="m.M", moe=True, layer=layer, layer_done=True
            )
    session.ready()
    sample("ready")
    return folder


def comparable(folder: Path) -> list[Line]:
    """The journal without what a replay cannot share: times, process ids, paths."""
    lines = [decode_line(line) for line in (folder / "rank-0.jsonl").read_bytes().splitlines()]
    return [
        msgspec.structs.replace(
            line, at_seconds=0, **({"duration_seconds": 0} if hasattr(line, "duration_seconds") else {})
        )
        for line in lines
        if not isinstance(line, RankStart)
    ]


def play(source: Path, home: Path, speed: float) -> Path:
    for thread in replay.start(source, home, "again", speed):
        thread.join(20)
        assert not thread.is_alive()
    return home / "runs" / "again"


def test_replay_makes_the_same_journal_again(tmp_path: Path) -> None:
    source = record(tmp_path)
    assert comparable(play(source, tmp_path, 20)) == comparable(source)


def test_replay_keeps_the_durations_of_the_source_at_any_speed(tmp_path: Path) -> None:
    source = record(tmp_path)
    again = play(source, tmp_path, 10)
    (conversion, _) = [
        line
        for line in map(decode_line, (again / "rank-0.jsonl").read_bytes().splitlines())
        if isinstance(line, Conversion)
    ]
    assert 0.09 < conversion.duration_seconds < 0.2


def test_replay_samples_the_recorded_device(tmp_path: Path) -> None:
    source = record(tmp_path)
    again = play(source, tmp_path, 5)
    lines = [decode_line(line) for line in (again / "device-0.jsonl").read_bytes().splitlines()]
    assert [line.device for line in lines if isinstance(line, DeviceFound)] == [GPU]
    peaks = {line.phase: line.phase_peak_bytes for line in lines if isinstance(line, Sample)}
    assert peaks["load_weights"] == 600 * MiB
    assert peaks["process_weights"] == 630 * MiB


def test_phase_peaks_and_ready_are_those_of_the_source(tmp_path: Path) -> None:
    source = record(tmp_path, "off")
    lines = [
        decode_line(line) for line in (play(source, tmp_path, 20) / "rank-0.jsonl").read_bytes().splitlines()
    ]
    assert [line.reserved_peak_bytes for line in lines if isinstance(line, PhaseEnd)] == [
        100 * MiB,
        160 * MiB,
    ]
    (ready,) = [line for line in lines if isinstance(line, Ready)]
    assert ready.memory == Memory(
        allocated_bytes=100 * MiB,
        reserved_bytes=160 * MiB,
        inactive_split_bytes=0,
        allocated_peak_bytes=100 * MiB,
        reserved_peak_bytes=160 * MiB,
        retries=1,
        ooms=0,
    )
