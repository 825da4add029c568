"""A made-up startup: layers that are created, then converted one by one, as loadpeak records it."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

from loadpeak.allocator.sizes import MIB
from loadpeak.record import (
    FORMAT,
    Conversion,
    Fix,
    Header,
    Line,
    MemoryHistory,
    Model,
    PhaseStart,
    RankStart,
    SettingsChange,
    encode_line,
)
from loadpeak.run_folder import write_header
from tests.allocator.making import Recorder

WALL = 1_700_000_000.0
"""The wall clock where the journal's clock, and the recorder's first event, say 1 second."""
CONF = "expandable_segments:True"


class Startup:
    """Events and journal of one rank: so many layers, under a split limit while they are loaded.

    With ``dies_in`` memory runs out in that layer, and nothing comes after.
    """

    def __init__(self, layers: int = 6, releases: bool = False, dies_in: int | None = None) -> None:
        self.recorder = Recorder()
        self.lines: list[Line] = [
            RankStart(at_seconds=1.0, at_wall_seconds=WALL + 1.0, rank=0, local_rank=0, pid=1),
            PhaseStart(at_seconds=1.0, phase="init_device"),
        ]
        if releases:
            self.lines.append(Fix(at_seconds=1.0, name="release", value="moe-layer", active=True))
        self._say(SettingsChange, settings=f"{CONF},max_split_size_mb:20")
        self._say(PhaseStart, phase="create_model", settings=f"{CONF},max_split_size_mb:20")
        self._say(Model, layers=tuple(range(layers)), moe_layers=tuple(range(layers)), conversions=layers)
        sources = [self.recorder.alloc(64 * MIB) for _ in range(layers)]
        self.recorder.alloc(MIB)
        for layer, source in enumerate(sources):
            if layer == dies_in:
                self._die(layer)
                return
            self._convert(layer, source, releases)
        self._say(SettingsChange, settings=CONF)
        self.recorder.free(self.recorder.alloc(MIB), MIB)

    @property
    def now(self) -> float:
        """Seconds on the journal's clock: between the last event and the next."""
        return 1.0 + (len(self.recorder.events) - 0.5) / 1e6

    def _say(self, kind: Any, **fields: Any) -> None:
        self.lines.append(kind(at_seconds=self.now, **fields))

    def _convert(self, layer: int, source: int, releases: bool) -> None:
        """30 MiB of work, 16 MiB that stay, the source's 64 MiB freed."""
        begun = self.now
        work = self.recorder.alloc(30 * MIB)
        for _ in range(2):
            self.recorder.alloc(8 * MIB)
        self.recorder.free(work, 30 * MIB)
        self.recorder.free(source, 64 * MIB)
        duration = self.now - begun
        if releases:
            self.recorder.add("segment_unmap", 60 * MIB, source)
        self._converted(layer, begun, duration, released_bytes=60 * MIB if releases else None)

    def _die(self, layer: int) -> None:
        begun = self.now
        self.recorder.alloc(30 * MIB)
        self.recorder.add("oom", 2048 * MIB)
        self._converted(layer, begun, self.now - begun, failed=True)

    def _converted(self, layer: int, begun: float, duration: float, **more: Any) -> None:
        line = Conversion(
            at_seconds=begun,
            name=f"layers.{layer}.experts",
            method="m.FusedMoE",
            moe=True,
            phase="process_weights",
            duration_seconds=duration,
            layer=layer,
            layer_done=True,
            **more,
        )
        self.lines.append(line)

    def events(self) -> list[dict[str, Any]]:
        """The events, at the times that the journal speaks of."""
        offset = int(WALL * 1e6)
        return [{**event, "time_us": offset + event["time_us"]} for event in self.recorder.events]

    def write(self, folder: Path, entries_limit: int = 100_000) -> Path:
        """The run's folder as loadpeak leaves it; returns the history's path."""
        path = folder / "history-0.pickle.gz"
        self._say(MemoryHistory, file=path.name, entries_limit=entries_limit)
        content = {
            "device_traces": [self.events()],
            "segments": [],
            "allocator_settings": {"expandable_segments": True},
        }
        path.write_bytes(gzip.compress(pickle.dumps(content)))
        header = Header(
            format=FORMAT,
            run=folder.name,
            created_at_wall_seconds=WALL,
            hostname="host",
            loadpeak_version="0",
            variant="baseline",
            release="off",
            split_limit="vllm",
            alloc_conf=CONF,
        )
        write_header(folder, header)
        (folder / "rank-0.jsonl").write_bytes(b"".join(map(encode_line, self.lines)))
        return path
