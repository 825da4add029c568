"""Hosts of a made-up fleet: the shipped records, cast as startups on four V100 each.

Figures are the recorded ones scaled to the card, so that dashboards and alerts have something to show
where there is no GPU; they are no measurement of a V100. A startup that runs out of memory is the
recorded one, cut where the card would have been full.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadpeak import run_folder
from loadpeak.record import (
    AnyLine,
    Conversion,
    Device,
    DeviceFound,
    Failure,
    Line,
    decode_header,
    decode_line,
    encode_line,
)
from loadpeak_exporter import replay

RANKS = 4
CARD_BYTES = 32501 << 20
"""What CUDA can allocate on a V100 with 32 GB: 31.74 GiB."""
SCALE = 0.96
"""Brings the recorded peak, on a card capped at 32 GiB, to just below what the V100 has."""
PAUSE_SECONDS = 20.0


class Act(NamedTuple):
    """One startup of a host: which record, and the layer at which it runs out of memory, if it does."""

    variant: str
    fails_at_layer: int | None = None


STORIES: dict[str, tuple[Act, ...]] = {
    "fixed": (Act("baseline"), Act("moe-layer"), Act("moe-layer")),
    "tight": (Act("baseline"),),
    "failing": (Act("baseline", fails_at_layer=40), Act("moe-layer")),
}
"""What happens on a host, over and over."""


def play(recorded: Path, home: Path, story: str, speed: float) -> None:
    """Play a host's story into a run store, without end.

    Args:
        recorded: folder of the shipped records.
        home: run store to write into.
        story: a key of :data:`STORIES`.
        speed: how many times faster than it was.
    """
    while True:
        for act in STORIES[story]:
            source = Path(tempfile.mkdtemp(prefix="loadpeak-cast-"))
            try:
                cast(recorded / act.variant, source, act)
                run = run_folder.new_run_id(time.time(), act.variant)
                for thread in replay.start(source, home, run, speed):
                    thread.join()
            finally:
                shutil.rmtree(source, ignore_errors=True)
            time.sleep(PAUSE_SECONDS / speed)


def cast(record: Path, target: Path, act: Act) -> None:
    """Write a recorded startup of one rank as one of four ranks on V100 cards."""
    header = decode_header((record / run_folder.HEADER).read_bytes())
    model = Path(header.model or "").name
    changes = {"model": model, "tp_size": RANKS, "world_size": RANKS}
    run_folder.write_header(target, msgspec.structs.replace(header, **changes))
    journal = _read(run_folder.journal_path(record, 0))
    samples = _read(run_folder.device_path(record, 0))
    end = None
    if act.fails_at_layer is not None:
        journal = list(_until_full(journal, act.fails_at_layer))
        end = journal[-1].at_seconds
    for rank in range(RANKS):
        scale = SCALE * (1 - 0.004 * rank)
        _write(run_folder.journal_path(target, rank), (_scaled(line, scale) for line in journal))
        kept = [line for line in samples if end is None or line.at_seconds <= end]
        _write(run_folder.device_path(target, rank), (_on_card(_scaled(line, scale), rank) for line in kept))


def _until_full(journal: Iterable[AnyLine], layer: int) -> Iterable[AnyLine]:
    """The journal up to a layer's experts, where the startup runs out of memory."""
    for line in journal:
        if isinstance(line, Conversion) and line.layer == layer and line.moe:
            yield Failure(
                at_seconds=line.at_seconds + line.duration_seconds,
                outcome="oom",
                error="OutOfMemoryError",
                message="CUDA out of memory. Tried to allocate 288.00 MiB. (a made-up failure of the demo)",
                phase="process_weights",
                memory=line.before,
            )
            return
        yield line


def _on_card(line: AnyLine, rank: int) -> AnyLine:
    if not isinstance(line, DeviceFound):
        return line
    device = Device(
        kind="nvml",
        name="Tesla V100-SXM2-32GB",
        uuid=f"GPU-{platform.node()}-{rank}",
        index=rank,
        total_bytes=CARD_BYTES,
    )
    return DeviceFound(at_seconds=line.at_seconds, device=device)


def _scaled(struct: Any, scale: float) -> Any:
    """A line, or a part of one, with every size in it scaled."""
    changes: dict[str, Any] = {}
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if name.endswith("_bytes") and value is not None:
            changes[name] = int(value * scale)
        elif isinstance(value, msgspec.Struct):
            changes[name] = _scaled(value, scale)
    return msgspec.structs.replace(struct, **changes)


def _read(path: Path) -> list[AnyLine]:
    return [decode_line(line) for line in path.read_bytes().splitlines()]


def _write(path: Path, lines: Iterable[Line]) -> None:
    path.write_bytes(b"".join(encode_line(line) for line in lines))
