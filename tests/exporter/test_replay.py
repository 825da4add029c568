"""A replay makes the same record again, through the recorder and the sampler."""

from pathlib import Path

import msgspec

from loadpeak.record import (
    Conversion,
    DeviceFound,
    Line,
    Memory,
    PhaseEnd,
    RankStart,
    Ready,
    Sample,
    decode_line,
)
from loadpeak_exporter import replay
from tests.exporter.building import GPU, Startup
from tests.fakes import MiB


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
    source = Startup(tmp_path, release="moe-layer").load().ready().folder
    assert comparable(play(source, tmp_path, 20)) == comparable(source)


def test_replay_keeps_the_durations_of_the_source_at_any_speed(tmp_path: Path) -> None:
    source = Startup(tmp_path, release="moe-layer").load().ready().folder
    again = play(source, tmp_path, 10)
    (conversion, _) = [
        line
        for line in map(decode_line, (again / "rank-0.jsonl").read_bytes().splitlines())
        if isinstance(line, Conversion)
    ]
    assert 0.09 < conversion.duration_seconds < 0.2


def test_replay_samples_the_recorded_device(tmp_path: Path) -> None:
    source = Startup(tmp_path, release="moe-layer").load().ready().folder
    again = play(source, tmp_path, 5)
    lines = [decode_line(line) for line in (again / "device-0.jsonl").read_bytes().splitlines()]
    assert [line.device for line in lines if isinstance(line, DeviceFound)] == [GPU]
    peaks = {line.phase: line.phase_peak_bytes for line in lines if isinstance(line, Sample)}
    assert peaks["load_weights"] == 600 * MiB
    assert peaks["process_weights"] == 630 * MiB


def test_phase_peaks_and_ready_are_those_of_the_source(tmp_path: Path) -> None:
    source = Startup(tmp_path).load().ready().folder
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
