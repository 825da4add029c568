"""Everything that is known of one recorded run: its history, and what loadpeak's own record adds to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadpeak import run_folder
from loadpeak.allocator.history import History
from loadpeak.allocator.replay import Boundary, Change, conf_at
from loadpeak.allocator.settings import AllocatorSettings, difference, parse
from loadpeak.errors import CommandError, SettingError
from loadpeak.record import (
    AnyLine,
    Conversion,
    Fix,
    MemoryHistory,
    Model,
    PhaseStart,
    RankStart,
    SettingsChange,
    decode_line,
)
from loadpeak.snapshot import Snapshot
from loadpeak.whatif.layers import infer


class DeviceRun(NamedTuple):
    """One device's part of a run.

    Attributes:
        history: what its allocator was asked for.
        changes: settings that the program itself put in force for a while.
        boundaries: ends of conversions, in order.
    """

    history: History
    changes: tuple[Change, ...]
    boundaries: tuple[Boundary, ...]


class Source(NamedTuple):
    """A recorded run.

    Attributes:
        devices: those with a history.
        alloc_conf: what the process was started with.
        release: the release policy in force while it was recorded.
        layers_from: ``record``, ``inferred``, or ``unknown`` where there are no layers.
        layers_expected: how many the model has, if the record says so.
        timeline_from: ``record``, ``file``, or ``nothing`` where the settings are taken not to change.
        cut_off: whether older events made room for newer ones in the history.
    """

    devices: tuple[DeviceRun, ...]
    alloc_conf: str
    release: str
    layers_from: str
    layers_expected: int | None
    timeline_from: str
    cut_off: bool = False

    @property
    def limit_bytes(self) -> int | None:
        """The most that could be reserved while it was recorded, where it found no memory at some time."""
        limits = [run.history.limit_bytes for run in self.devices if run.history.limit_bytes is not None]
        return min(limits) - 1 if limits else None


def build(snapshot: Snapshot, path: Path, timeline: Sequence[Change] | None = None) -> Source:
    """A run from its snapshot, the journal beside it, and a timeline given by hand.

    Args:
        snapshot: what ``path`` holds.
        path: where it was read; loadpeak's own histories have the journal of their rank beside them.
        timeline: changes of the settings, in place of those that the journal tells.

    Raises:
        CommandError: the journal cannot be read, or the timeline goes on after the history.
    """
    length = max(len(history.times_us) for history in snapshot.histories)
    last = max((change.to_event for change in timeline or ()), default=0)
    if last > length:
        raise CommandError(f"the timeline goes on to event {last}; {path} has {length}: is it another's?")
    lines = journal_beside(path)
    header = run_folder.read_header(path.parent) if lines else None
    phases = [line for line in lines if isinstance(line, PhaseStart) and line.settings is not None]
    if header is not None:
        conf = header.alloc_conf or ""
    elif phases:
        conf = phases[0].settings or ""
    else:
        conf = snapshot.alloc_conf
    devices = []
    for history in snapshot.histories:
        changes = timeline if timeline is not None else _changes(lines, conf, history)
        boundaries = _boundaries(lines, history) or infer(history)
        judged = history.judged(partial(_settings_at, conf, changes))
        devices.append(DeviceRun(judged, tuple(changes), tuple(boundaries)))
    recorded = any(isinstance(line, Conversion) for line in lines)
    layers = any(run.boundaries for run in devices)
    return Source(
        devices=tuple(devices),
        alloc_conf=conf,
        release=next(
            (
                line.value
                for line in lines
                if isinstance(line, Fix) and line.name == "release" and line.active
            ),
            "off",
        ),
        layers_from="record" if recorded else "inferred" if layers else "unknown",
        layers_expected=sum(len(line.layers) for line in lines if isinstance(line, Model)) or None,
        cut_off=any(
            len(run.history.times_us) >= line.entries_limit
            for line in lines
            if isinstance(line, MemoryHistory)
            for run in devices
        ),
        timeline_from="file" if timeline is not None else "record" if phases else "nothing",
    )


def _settings_at(conf: str, changes: Sequence[Change], event: int) -> AllocatorSettings:
    return parse(conf_at(conf, changes, event))


# ── loadpeak's own record ─────────────────────────────────────────────────────────────────────────


_LAST_SECOND = 1e11
"""No clock shows more: a time beyond it is damage."""
_TIMES = ("at_seconds", "at_wall_seconds", "duration_seconds")


def journal_beside(path: Path) -> list[AnyLine]:
    """The lines of the journal that belongs to a history of loadpeak's own; none for other snapshots."""
    name = re.fullmatch(r"history-(\d+)\.pickle(\.gz|\.xz)?", path.name)
    journal = run_folder.journal_path(path.parent, int(name[1])) if name else None
    if journal is None or not journal.exists():
        return []
    lines: list[AnyLine] = []
    try:
        texts = journal.read_bytes().splitlines()
    except OSError as error:
        raise CommandError(f"the journal {journal} cannot be read: {error.strerror}") from None
    for text in texts:
        try:
            line = decode_line(text)
        except msgspec.DecodeError:
            continue
        if all(abs(getattr(line, name, None) or 0) < _LAST_SECOND for name in _TIMES):
            lines.append(line)
    # Without its first line the journal's clock is not known, so nothing in it has a place in the history.
    return lines if any(isinstance(line, RankStart) for line in lines) else []


def _clock_offset(lines: Iterable[AnyLine]) -> float:
    """Seconds from the journal's clock to the wall clock, which histories use."""
    start = next(line for line in lines if isinstance(line, RankStart))
    return start.at_wall_seconds - start.at_seconds


def _event(lines: Iterable[AnyLine], history: History, at_seconds: float) -> int:
    return history.event_after(int((at_seconds + _clock_offset(lines)) * 1e6))


def _changes(lines: Sequence[AnyLine], conf: str, history: History) -> list[Change]:
    """What the record says about settings in force, as changes on top of what the process began with."""
    known = [
        (_event(lines, history, line.at_seconds), line.settings)
        for line in lines
        if isinstance(line, PhaseStart | SettingsChange) and line.settings is not None
    ]
    changes: list[Change] = []
    for (event, settings), (end, _) in pairwise([*known, (len(history.times_us), "")]):
        more = difference(conf, settings)
        if changes and changes[-1].alloc_conf == more and changes[-1].to_event == event:
            changes[-1] = changes[-1]._replace(to_event=end)
        elif more and event < end:
            changes.append(Change(event, end, more))
    return changes


def _boundaries(lines: Sequence[AnyLine], history: History) -> list[Boundary]:
    """The end of each conversion in the record that was not part of another; the last may be an error's."""
    boundaries: list[Boundary] = []
    outer_begins = float("inf")
    for line in reversed(lines):
        if not isinstance(line, Conversion):
            continue
        end = line.at_seconds + line.duration_seconds
        if end > outer_begins:
            continue
        outer_begins = line.at_seconds
        begin, event = (_event(lines, history, at) for at in (line.at_seconds, end))
        boundaries.append(Boundary(begin, event, line.layer, line.moe, line.released_bytes is not None))
    return boundaries[::-1]


# ── a timeline given by hand ──────────────────────────────────────────────────────────────────────


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    from_event: int
    to_event: int
    alloc_conf: str


def read_timeline(path: Path) -> tuple[Change, ...]:
    """Changes of the settings from a JSON file, as ``--timeline`` takes it.

    Raises:
        CommandError: it cannot be read or is not of that form.
    """
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Entry])
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(
            f"the timeline {path} cannot be used ({error}); expected "
            '[{"from_event": 28, "to_event": 418486, "alloc_conf": "max_split_size_mb:20"}]'
        ) from None
    for entry in entries:
        if not 0 <= entry.from_event <= entry.to_event:
            raise CommandError(
                f"the timeline {path} has an entry from event {entry.from_event} to {entry.to_event}; "
                "expected numbers from 0 on, the second not below the first"
            )
        try:
            parse(entry.alloc_conf)
        except SettingError as error:
            raise CommandError(f"the timeline {path} cannot be used: {error}") from None
    return tuple(Change(entry.from_event, entry.to_event, entry.alloc_conf) for entry in entries)
