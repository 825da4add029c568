"""Recorded startups for the tests, written through the session and the journal."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from loadpeak import run_folder
from loadpeak.journal import Journal
from loadpeak.record import Device, DeviceFound, Header, RankStart, Sample, SamplerStart
from loadpeak.session import Session
from loadpeak_patches.policies import parse
from loadpeak_patches.release import CacheRelease
from tests.fakes import FakeAllocator, FakeClock, MiB, phase_of
from tests.profiler.test_record_files import header

GPU = Device(kind="nvml", name="Tesla V100-SXM2-32GB", uuid="GPU-a", index=0, total_bytes=32 << 30)
RESIDENT = Device(kind="resident", name="resident memory of the process")


class Startup:
    """A rank that starts up: a test calls what happens, the files are those of a real rank."""

    def __init__(
        self,
        home: Path,
        run: str = "source",
        rank: int = 0,
        release: str = "off",
        device: Device = GPU,
        pid: int = 1,
        at: float = 5000.0,
        wall: float = 1.0,
        allocator: FakeAllocator | None = None,
        **facts: object,
    ) -> None:
        self.folder = home / "runs" / run
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            known: dict[str, object] = {"run": run, "release": release, **facts}
            values = {name: getattr(header(), name) for name in Header.__struct_fields__}
            run_folder.write_header(self.folder, Header(**{**values, **known}))
        self.journal = Journal(run_folder.journal_path(self.folder, rank))
        self.samples = Journal(run_folder.device_path(self.folder, rank))
        self.clock = FakeClock(at, step=0.001)
        self.allocator = allocator or FakeAllocator()
        self.journal.append(
            RankStart(at_seconds=self.clock(), at_wall_seconds=wall, rank=rank, local_rank=rank, pid=pid)
        )
        self.samples.append(
            SamplerStart(
                at_seconds=self.clock(), at_wall_seconds=1.0, rank=rank, interval_seconds=0.01, pid=2
            )
        )
        self.samples.append(DeviceFound(at_seconds=self.clock(), device=device))
        self.session = Session(
            self.allocator,
            self.journal.append,
            clock=self.clock,
            is_out_of_memory=lambda error: "out of memory" in str(error),
        )
        CacheRelease(self.session, parse(release)).apply()

    def sample(self, used: int | None = None, gap: float | None = 0.01) -> None:
        """A device sample: what the allocator holds and 500 MiB of context, unless told otherwise."""
        used = self.allocator.reserved + 500 * MiB if used is None else used
        self.samples.append(
            Sample(
                at_seconds=self.clock(),
                phase=self.session.phase,
                used_bytes=used,
                phase_peak_bytes=used,
                gap_seconds=gap,
            )
        )

    def convert(self, layer: int | None, moe: bool = True, done: bool = True, hoard: int = 30 * MiB) -> None:
        """A conversion that leaves so much in the cache and lasts 0.1 s."""
        watch = self.session.start_conversion()
        self.allocator.hoard(hoard)
        self.clock.sleep(0.1)
        self.sample()
        name = "lm_head" if layer is None else f"model.layers.{layer}.{'experts' if moe else 'qkv'}"
        self.session.end_conversion(watch, name=name, method="m.M", moe=moe, layer=layer, layer_done=done)

    def load(self, layers: int = 2, retries: bool = True) -> Startup:
        """Weights of 100 MiB, then so many converted layers, with more allocator retries in each."""
        with phase_of(self.session, "load_weights"):
            self.allocator.allocate(100 * MiB)
            self.sample()
            self.clock.sleep(0.2)
        with phase_of(self.session, "process_weights"):
            self.session.model(range(layers), range(layers), layers)
            for layer in range(layers):
                self.allocator.retries += layer if retries else 0
                self.convert(layer)
        return self

    def ready(self) -> Startup:
        """The engine serves."""
        self.session.ready()
        self.sample()
        return self

    def close(self) -> None:
        """Nothing more happens: close the files, of which a test with many startups would have too many."""
        self.journal.close()
        self.samples.close()


def copies(folder: Path, count: int, old: bool = False) -> None:
    """So many runs beside a finished one, equal but for their names and times; they share its other files.

    Args:
        folder: the run.
        count: how many.
        old: all files were written in 2001.
    """
    header = run_folder.read_header(folder)
    assert header is not None
    files = [path for path in folder.iterdir() if path.name != run_folder.HEADER]
    for number in range(1, count + 1):
        copy = folder.with_name(f"{folder.name}-{number}")
        copy.mkdir()
        for path in files:
            os.link(path, copy / path.name)
        created = header.created_at_wall_seconds + number
        run_folder.write_header(
            copy, msgspec.structs.replace(header, run=copy.name, created_at_wall_seconds=created)
        )
        if old:
            os.utime(copy / run_folder.HEADER, (1e9, 1e9))
    if old:
        for path in folder.iterdir():
            os.utime(path, (1e9, 1e9))
