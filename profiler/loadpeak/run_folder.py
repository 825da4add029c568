"""Find or make the folder of a run, so that all ranks of one engine write into the same.

Ranks do not talk to each other. What they share is the engine's instance id (vLLM gives every
worker of an engine the same configuration), so under a lock the first rank makes the folder and
writes the header, and the others find it.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadpeak.record import Header, decode_header, encode_header

RUNS = "runs"
HEADER = "run.json"
_JOURNAL = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")
SAME_START_SECONDS = 3600.0
"""Ranks of one engine join it within this time; a later engine with the same id is another run."""


def journal_path(folder: Path, rank: int) -> Path:
    """The journal that a rank writes."""
    return folder / f"rank-{rank}.jsonl"


def ranks(folder: Path) -> list[int]:
    """Numbers of the ranks that have a journal, lowest first.

    Raises:
        OSError: the folder cannot be listed.
    """
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _JOURNAL.fullmatch(path.name)))


def device_path(folder: Path, rank: int) -> Path:
    """What the sampler of a rank writes."""
    return folder / f"device-{rank}.jsonl"


def history_path(folder: Path, rank: int) -> Path:
    """The allocator history that a rank writes when its startup is over, if it records one."""
    return folder / f"history-{rank}.pickle.gz"


def command_path(folder: Path) -> Path:
    """What ``loadpeak run`` writes."""
    return folder / "command.jsonl"


def new_run_id(wall_seconds: float, suffix: str) -> str:
    """A run id that sorts by time, for example ``20261201T084830.125-1f3a9``."""
    seconds = time.strftime("%Y%m%dT%H%M%S", time.gmtime(wall_seconds))
    return f"{seconds}.{int(wall_seconds % 1 * 1000):03}-{suffix}"


def read_header(folder: Path) -> Header | None:
    """The header of a run folder, or nothing if it has none that can be read."""
    try:
        return decode_header((folder / HEADER).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def write_header(folder: Path, header: Header) -> None:
    """Write ``run.json`` in one step: a reader sees all of it or none."""
    temporary = folder / f".{HEADER}.{os.getpid()}"
    temporary.write_bytes(encode_header(header))
    temporary.replace(folder / HEADER)


def whereabouts() -> tuple[str | None, int | None]:
    """The boot and the pid namespace of this process: where its process ids mean something."""
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            Path("/proc/self/ns/pid").stat().st_ino,
        )
    except OSError:
        return None, None


def join(
    home: Path, rank: int, make_header: Callable[[str], Header], wanted_id: str | None, wall_seconds: float
) -> Path:
    """The folder that this rank writes into; made, with its header, by the first rank that comes.

    Args:
        home: ``$LOADPEAK_HOME``.
        rank: number of this rank, unique in the engine.
        make_header: builds the header for a run id; called by the first rank only.
        wanted_id: run id from ``LOADPEAK_RUN_ID``; used unless another engine took it.
        wall_seconds: now.

    Raises:
        OSError: the store cannot be written.
    """
    runs = home / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    probe = make_header(wanted_id or "")
    suffix = (probe.engine_instance or f"{os.getpid():x}")[-6:]
    with (runs / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        candidates = [runs / wanted_id] if wanted_id else []
        candidates += sorted(runs.glob(f"*-{suffix}"), reverse=True)
        for folder in candidates:
            header = read_header(folder)
            if (
                header is not None
                and header.engine_instance == probe.engine_instance
                and wall_seconds - header.created_at_wall_seconds < SAME_START_SECONDS
                and not journal_path(folder, rank).exists()
            ):
                return folder
        run = wanted_id if wanted_id and not (runs / wanted_id).exists() else new_run_id(wall_seconds, suffix)
        while (runs / run).exists():
            run += "x"
        folder = runs / run
        folder.mkdir()
        write_header(folder, make_header(run))
        return folder
