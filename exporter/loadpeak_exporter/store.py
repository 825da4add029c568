"""The run store: every run of a host, live ones followed as they are written."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadpeak import run_folder
from loadpeak.errors import AmbiguousRunError, RunNotFoundError
from loadpeak.record import CommandEnd, Header, Outcome, decode_header
from loadpeak_exporter.fold import RankFold
from loadpeak_exporter.history import Timeline
from loadpeak_exporter.host import Host
from loadpeak_exporter.listing import Listing
from loadpeak_exporter.records import DamagedRun, RankRecord, RunRecord
from loadpeak_exporter.tail import Damage, Tail

STALE_SECONDS = 60.0
"""Where a rank's process cannot be looked up, this long without a line means that it is gone."""

MOST_RANKS = 256
"""Ranks of a run that are read; no engine has as many, and what reads runs need not bound them again."""
MOST_READERS = 64
"""Readers that are kept beside those of ``/metrics``; another one starts its files from the beginning."""
MOST_SHORT = 10_000
"""Runs whose short form is kept."""


class _Rank(NamedTuple):
    fold: RankFold
    journal: Tail
    samples: Tail


class RunReader:
    """One run folder. :meth:`read` returns the same object as long as nothing has changed.

    Threads may share it: handlers of the host service do.
    """

    def __init__(self, folder: Path, host: Host) -> None:
        self.folder = folder
        self._host = host
        self._lock = threading.Lock()
        self._start_over(None)

    def _start_over(self, header_inode: int | None) -> None:
        self._header_inode = header_inode
        self._ranks: dict[int, _Rank] = {}
        self._left_out: tuple[Damage, ...] = ()
        self._command = Tail(run_folder.command_path(self.folder))
        self._exit_code: int | None = None
        self._header: Header | None = None
        self._record: RunRecord | DamagedRun | None = None

    def read(self) -> RunRecord | DamagedRun:
        """What the folder says now; from the beginning where it is another one than before."""
        with self._lock:
            inode = self._inode_of_header()
            if inode != self._header_inode:
                self._start_over(inode)
            record = self._read()
            if any(tail.rewritten for tail in self._tails()):
                self._start_over(inode)
                record = self._read()
            return record

    def _inode_of_header(self) -> int | None:
        try:
            return (self.folder / run_folder.HEADER).stat().st_ino
        except OSError:
            return None

    def _tails(self) -> list[Tail]:
        return [*(tail for rank in self._ranks.values() for tail in rank[1:]), self._command]

    def _read(self) -> RunRecord | DamagedRun:
        if self._header is None:
            header = run_folder.read_header(self.folder)
            # A folder that was copied or renamed is a run of its own.
            self._header = header and msgspec.structs.replace(header, run=self.folder.name)
        if self._header is None:
            return DamagedRun(run=self.folder.name, damage=self._header_damage())
        record = self._record
        if self.settled and record is not None:
            return record
        changed = self._follow()
        if isinstance(record, RunRecord) and not changed and record.outcome != "loading":
            return record
        renewed = self._build(self._header)
        if not renewed.ranks and (damage := renewed.damage or self._silence(self._header)):
            self._record = None
            return DamagedRun(run=self.folder.name, damage=damage)
        if not isinstance(record, RunRecord) or changed or renewed != record:
            self._record = record = renewed
        return record

    def timeline(self, rank: int, points: int) -> Timeline | None:
        """What a rank's memory did over time, as of the last :meth:`read`; nothing without that rank."""
        found = self._ranks.get(rank)
        if found is None or found.fold.start is None:
            return None
        with self._lock:
            return found.fold.history.timeline(rank, found.fold.start.at_seconds, points)

    def _header_damage(self) -> tuple[Damage, ...]:
        path = self.folder / run_folder.HEADER
        try:
            decode_header(path.read_bytes())
        except FileNotFoundError:
            reason = "is not there; the folder is no run, or its first rank died before it wrote one"
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"cannot be read: {error}"
        else:
            return ()
        return (Damage(run_folder.HEADER, 0, reason),)

    def _silence(self, header: Header) -> tuple[Damage, ...]:
        """For a run without ranks: nothing while they may still come."""
        if self._host.wall() - header.created_at_wall_seconds <= STALE_SECONDS:
            return ()
        reason = "holds no line of any rank; they died, or found the disk full, before they could write one"
        return (Damage("the folder", 0, reason),)

    def _damage(self) -> tuple[Damage, ...]:
        return self._left_out + tuple(damage for tail in self._tails() for damage in tail.damage)

    @property
    def unread(self) -> bool:
        """Whether nothing of the run is known yet."""
        return self._record is None

    @property
    def settled(self) -> bool:
        """Whether the run has ended and been quiet for so long that its files need no further look."""
        if not isinstance(self._record, RunRecord) or self._record.outcome == "loading":
            return False
        return self._host.wall() - self._written_at_wall_seconds() > STALE_SECONDS

    def _written_at_wall_seconds(self) -> float:
        """When a file was written last, as of the last look."""
        return max(tail.modified_at_wall_seconds or 0.0 for tail in self._tails())

    def _follow(self) -> bool:
        """Read what was added to any file; true if anything was."""
        changed, damage = False, self._damage()
        if len(self._ranks) < MOST_RANKS:
            self._look_for_ranks()
        for rank in self._ranks.values():
            for tail in (rank.journal, rank.samples):
                for line in tail.read():
                    rank.fold.feed(line)
                    changed = True
        for line in self._command.read():
            if isinstance(line, CommandEnd):
                self._exit_code = line.exit_code
                changed = True
        return changed or self._damage() != damage

    def _look_for_ranks(self) -> None:
        """Take up journals that have come, as long as there is room for more."""
        self._left_out = ()
        try:
            numbers = [number for number in run_folder.ranks(self.folder) if number not in self._ranks]
        except OSError as error:
            self._left_out = (Damage("the folder", 0, f"cannot be listed: {error.strerror}"),)
            return
        room = MOST_RANKS - len(self._ranks)
        for number in numbers[:room]:
            journal = Tail(run_folder.journal_path(self.folder, number))
            samples = Tail(run_folder.device_path(self.folder, number))
            self._ranks[number] = _Rank(RankFold(), journal, samples)
        if len(numbers) > room:
            reason = f"holds more ranks than any engine has; {MOST_RANKS} of them are read"
            self._left_out = (Damage("the folder", 0, reason),)

    def _build(self, header: Header) -> RunRecord:
        here = header.boot_id is not None and header.boot_id == self._host.boot_id
        ranks = [
            # A journal that was copied is the rank that its name says: each number is there once.
            record if record.rank == number else msgspec.structs.replace(record, rank=number)
            for number in sorted(self._ranks)
            if (record := self._rank_record(self._ranks[number], header, here)) is not None
        ]
        return RunRecord(
            header=header,
            outcome=run_outcome(ranks),
            ranks=tuple(ranks),
            damage=self._damage(),
            exit_code=self._exit_code,
        )

    def _rank_record(self, rank: _Rank, header: Header, here: bool) -> RankRecord | None:
        fold = rank.fold
        gone = self._gone(rank, header) if fold.outcome == "loading" else None
        gone = gone and (self._doubt(rank) or gone)
        return fold.record(self._host.clock() if here and gone is None else None, gone)

    def _gone(self, rank: _Rank, header: Header) -> str | None:
        """Why a rank that says ``loading`` must be dead, if it must."""
        start = rank.fold.start
        if start is None:
            return None
        if self._host.shares_pids(header):
            lives = self._host.lives(start.pid, start.at_seconds)
            return None if lives else "the process was gone before the engine was ready"
        # Another host, or another container: process ids mean nothing here.
        modified = max(tail.modified_at_wall_seconds or 0.0 for tail in (rank.journal, rank.samples))
        if self._host.wall() - modified > STALE_SECONDS:
            return f"nothing was written for {STALE_SECONDS:.0f} s before the engine was ready"
        return None

    def _doubt(self, rank: _Rank) -> str | None:
        """Why a rank that is gone without a word may have been ready before, if anything hints at it."""
        torn = next((tail for tail in (rank.journal, rank.samples) if tail.torn or tail.damage), None)
        if torn is not None:
            hint = f"{torn.path.name} is not whole, as on a full disk"
        elif self._exit_code == 0:
            hint = "the command ended with exit code 0"
        else:
            return None
        return f"the process is gone, and whether the engine was ready before is not known: {hint}"


class RunStore:
    """All runs below ``$LOADPEAK_HOME/runs``, however many. Threads may share it."""

    def __init__(self, home: Path, host: Host | None = None) -> None:
        self.folder = home / run_folder.RUNS
        self._host = host or Host.this()
        self._listing = Listing(self.folder)
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._short: dict[tuple[str, int | None], RunRecord] = {}
        self._listed: tuple[str, ...] = ()
        self._candidates: tuple[str, ...] = ()
        self._past: set[tuple[str, int | None]] = set()

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._listing.names())

    def runs(self, most: int | None = None, skip: int = 0) -> list[RunRecord | DamagedRun]:
        """Runs without their layers, newest first.

        Args:
            most: how many at most.
            skip: leave out so many of the newest.
        """
        names = self._listing.names()[skip:]
        return [self._in_short(name) for name in names[:most]]

    def exported(self, keep_seconds: float, most: int) -> list[RunRecord]:
        """Runs for ``/metrics``: those that load, then the newest that ended less than so long ago.

        What has once ended for so long, or has so many newer runs, is not looked at again.

        Args:
            keep_seconds: how long a run stays after its last line.
            most: how many at the most.
        """
        names = self._listing.names()
        if names is not self._listed:
            self._listed = names
            self._past.intersection_update(map(self._listing.place, names))
            self._candidates = self._not_past(names)
        oldest = self._host.wall() - keep_seconds
        live: list[RunRecord] = []
        ended: list[RunRecord] = []
        for name in self._candidates:
            enough = len(live) + len(ended) >= most
            since = self._host.wall() - STALE_SECONDS if enough else oldest
            reader = self.reader(name)
            if reader.unread and self._written(name) < since:
                self._past.add(self._listing.place(name))
                continue
            record = reader.read()
            if isinstance(record, DamagedRun) or not record.ranks:
                continue
            if record.outcome == "loading":
                live.append(record)
            elif enough or last_word(record) < oldest:
                self._past.add(self._listing.place(name))
            else:
                ended.append(record)
        self._candidates = self._not_past(self._candidates)
        return (live + ended)[:most]

    def _not_past(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if self._listing.place(name) not in self._past)

    def reader(self, run: str) -> RunReader:
        """The reader of a run by its full id; it keeps its place in the files."""
        with self._lock:
            reader = self._readers.pop(run, None) or RunReader(self.folder / run, self._host)
            self._readers[run] = reader
            if len(self._readers) > MOST_READERS + len(self._candidates):
                self._readers.popitem(last=False)
        return reader

    def _in_short(self, name: str) -> RunRecord | DamagedRun:
        place = self._listing.place(name)
        if place in self._short:
            return self._short[place]
        reader = self.reader(name)
        record = reader.read()
        if isinstance(record, DamagedRun):
            return record
        short = in_short(record)
        if reader.settled and len(self._short) < MOST_SHORT:
            self._short[place] = short
        return short

    def _written(self, name: str) -> float:
        """When any file of a run was written last, in seconds of the wall clock."""
        try:
            with os.scandir(self.folder / name) as entries:
                return max((entry.stat().st_mtime for entry in entries), default=0.0)
        except OSError:
            return 0.0

    def find(self, wanted: str) -> RunRecord:
        """A run by its id, a beginning of it, ``latest`` or ``latest:VARIANT``.

        Raises:
            RunNotFoundError: there is none, or it is damaged.
            AmbiguousRunError: several begin so.
        """
        names = self._listing.names()
        if wanted == "latest" or wanted.startswith("latest:"):
            variant = wanted.partition(":")[2]
            for name in names:
                if self._listing.variant(name) == variant if variant else self._listing.variant(name):
                    record = self.reader(name).read()
                    if isinstance(record, RunRecord):
                        return record
            which = f"of variant {variant!r} " if variant else ""
            raise RunNotFoundError(f"no run {which}in {self.folder}; `loadpeak runs` lists those there are")
        fitting = [wanted] if wanted in names else [name for name in names if name.startswith(wanted)]
        if not fitting:
            raise RunNotFoundError(
                f"no run {wanted!r} in {self.folder}; `loadpeak runs` lists those there are"
            )
        if len(fitting) > 1:
            raise AmbiguousRunError(
                f"{len(fitting)} runs begin with {wanted!r}: {', '.join(fitting[:5])}; give more of the id"
            )
        record = self.reader(fitting[0]).read()
        if isinstance(record, DamagedRun):
            damage = record.damage[0]
            raise RunNotFoundError(f"run {record.run} is damaged: {damage.file} {damage.reason}")
        return record


def in_short(run: RunRecord) -> RunRecord:
    """A run without the layers of its ranks."""
    ranks = tuple(msgspec.structs.replace(rank, layers=()) for rank in run.ranks)
    return msgspec.structs.replace(run, ranks=ranks)


def last_word(run: RunRecord) -> float:
    """When anything was last heard of a run, in seconds of the wall clock."""
    return max(
        (
            rank.started_at_wall_seconds + rank.updated_at_seconds - rank.started_at_seconds
            for rank in run.ranks
        ),
        default=run.header.created_at_wall_seconds,
    )


def run_outcome(ranks: list[RankRecord]) -> Outcome:
    """The outcome of a run from those of its ranks: the worst that happened, ready if all are."""
    outcomes = {rank.outcome for rank in ranks}
    for worst in ("oom", "failed", "killed"):
        if worst in outcomes:
            return worst
    return "ready" if outcomes == {"ready"} else "loading"
