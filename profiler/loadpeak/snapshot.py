"""Read PyTorch memory-history snapshots that may come from anybody.

A snapshot (``torch.cuda.memory._dump_snapshot``) is a pickle, and a pickle can name any function to be
called. Here it can name none: it is built from containers, numbers and strings alone, and whatever else it
asks for is refused by name. Its size is bounded by what reading may take of the memory, so a small file that
unpacks to a huge one, or that asks for room it does not fill, is an error like any other.
"""

from __future__ import annotations

import gc
import gzip
import io
import lzma
import pickle
import resource
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from loadpeak.allocator.history import History, from_trace
from loadpeak.allocator.settings import conf_string
from loadpeak.errors import SnapshotError

DEFAULT_LIMIT_BYTES = 1 << 30
"""Memory that reading a snapshot may take. A history of 600,000 events without stacks takes 0.4 GiB."""
_CHUNK = 1 << 20
_OTHER_PACKINGS = {b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
"""What a file begins with that is packed in a way that is not read here."""


class Snapshot(NamedTuple):
    """What a snapshot holds for a replay.

    Attributes:
        histories: one for each device that has events, by device index.
        alloc_conf: the settings in force when it was taken, as a conf string.
    """

    histories: tuple[History, ...]
    alloc_conf: str


def read(path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Snapshot:
    """Read a snapshot: a pickle as it is, or compressed with gzip or xz.

    Args:
        path: the file.
        limit_bytes: memory that reading may take.

    Raises:
        SnapshotError: it cannot be read, is cut off, asks for more than containers, numbers and strings,
            takes more memory than it may, or is no snapshot.
    """
    try:
        # Python's own reader prints a line of its own where it finds no room for an array of bytes.
        with _collector_off(), redirect_stderr(io.StringIO()), _memory_limit(limit_bytes):
            with path.open("rb") as file:
                data = _unpacked(file, limit_bytes)
            return _interpret(_Restricted(io.BytesIO(data)).load())
    except MemoryError:
        raise SnapshotError(
            f"{path} takes more than {limit_bytes:,} bytes of memory to read; --read-limit allows more"
        ) from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from None
    except _Refused as error:
        raise SnapshotError(f"{path} is no snapshot: {error}") from None
    except Exception as error:  # noqa: BLE001 - a broken pickle may raise anything
        reason = f"{type(error).__name__}: {error}"[:300]
        raise SnapshotError(f"{path} is no snapshot of PyTorch's memory history ({reason})") from None


def _unpacked(file: BinaryIO, limit_bytes: int) -> bytes:
    """All of a file, decompressed, if that is not too much."""
    head = file.read(6)
    file.seek(0)
    source: Any = file
    if head.startswith(b"\x1f\x8b"):
        source = gzip.GzipFile(fileobj=file)
    elif head == b"\xfd7zXZ\x00":
        source = lzma.LZMAFile(file)  # noqa: SIM115 - it borrows the file, which its owner closes
    for beginning, packing in _OTHER_PACKINGS.items():
        if head.startswith(beginning):
            raise _Refused(f"it is packed with {packing}; give it plain, or packed with gzip or xz")
    chunks: list[bytes] = []
    # Twice: the chunks, then all in one. What is built from them takes more still.
    room = limit_bytes // 2
    while chunk := source.read(_CHUNK):
        chunks.append(chunk)
        room -= len(chunk)
        if room < 0:
            raise MemoryError
    return b"".join(chunks)


class _Refused(Exception):
    """The file asks for something that no snapshot holds."""


class _Restricted(pickle.Unpickler):
    """Builds what the pickle machine can build by itself: containers, numbers and strings."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(f"it asks for {module}.{name}, and only containers, numbers and strings are read")

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("it refers to objects outside itself")


def _interpret(content: Any) -> Snapshot:
    """The histories in an unpickled snapshot."""
    if not isinstance(content, dict) or not isinstance(content.get("device_traces"), list):
        raise _Refused("it has no device_traces")
    segments: Sequence[Mapping[str, Any]] = content.get("segments") or []
    settings: Mapping[str, Any] = content.get("allocator_settings") or {}
    histories = []
    for device, trace in enumerate(content["device_traces"]):
        if not trace:
            continue
        own = [segment for segment in segments if segment.get("device", device) == device]
        histories.append(from_trace(device, trace, own))
    if not histories:
        raise _Refused("it holds no events: record with torch.cuda.memory._record_memory_history() first")
    return Snapshot(tuple(histories), conf_string(settings))


@contextmanager
def _collector_off() -> Iterator[None]:
    """Millions of containers without a cycle: looking for cycles among them would take most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _memory_limit(extra_bytes: int) -> Iterator[None]:
    """Let this process take so much more memory than it has, and no more.

    A pickle can ask for room of any size in a few bytes; then the system's own refusal is what helps.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + extra_bytes
    within = min(wanted, sys.maxsize if soft == resource.RLIM_INFINITY else soft)
    resource.setrlimit(resource.RLIMIT_AS, (within, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
