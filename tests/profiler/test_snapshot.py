"""Snapshots from anybody: what is no snapshot is said to be none, and none of it is run."""

import bz2
import gzip
import lzma
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadpeak.errors import SnapshotError
from loadpeak.snapshot import read

EVENT = {"action": "alloc", "addr": 1 << 30, "size": 4096, "stream": 0, "time_us": 1}


def content(**event: Any) -> dict[str, Any]:
    return {"device_traces": [[{**EVENT, **event}]], "segments": [], "allocator_settings": {}}


@pytest.fixture
def read_bytes(tmp_path: Path) -> Callable[[bytes], Any]:
    def read_them(data: bytes) -> Any:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(data)
        return read(path, limit_bytes=256 << 20)

    return read_them


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_snapshot_is_read_however_it_was_packed(
    read_bytes: Callable[[bytes], Any], pack: Callable[[bytes], bytes], protocol: int
) -> None:
    snapshot = read_bytes(pack(pickle.dumps(content(), protocol)))
    assert list(snapshot.histories[0].operations) == [4096]


def test_each_device_with_events_has_a_history(read_bytes: Callable[[bytes], Any]) -> None:
    found = {**content(), "device_traces": [[EVENT], [], [EVENT, {**EVENT, "addr": 1 << 31}]]}
    histories = read_bytes(pickle.dumps(found)).histories
    assert [(history.device, len(history.operations)) for history in histories] == [(0, 1), (2, 2)]


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


HOSTILE = {
    "calls a function": (pickle.dumps({"device_traces": Harmful()}), "posix.system"),
    "calls one the old way": (b"(ios\nsystem\n.", "os.system"),
    "names a class": (b"\x80\x04cbuiltins\neval\n.", "builtins.eval"),
    "refers outside": (b"\x80\x04Pfoo\n.", "outside itself"),
    "has an extension": (b"\x80\x04\x82\x01.", "extension"),
    "is cut off": (pickle.dumps(content())[:-20], "truncated"),
    "is cut off, xz": (lzma.compress(pickle.dumps(content()))[:-20], "cannot be read"),
    "is cut off, gzip": (gzip.compress(pickle.dumps(content()))[:-20], "cannot be read"),
    "is empty": (b"", "cannot be read"),
    "is packed with bzip2": (bz2.compress(pickle.dumps(content())), "bzip2; give it plain, or .* gzip or xz"),
    "is packed with zstd": (b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00", "zstd; give it plain"),
    "is packed with zip": (b"PK\x03\x04" + bytes(26), "zip; give it plain"),
    "is text": (b"not a pickle", "no snapshot"),
    "unpacks to too much": (gzip.compress(bytes(1 << 20), 9) * 300, "memory to read"),
    "asks for room": (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.", "memory to read"),
    "asks for a huge memo": (b"\x80\x04K\x01r\xff\xff\xff\x7f.", "memory to read"),
    "is nested deeply": (b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".", "no device_traces"),
    "is another pickle": (pickle.dumps([1, 2]), "no device_traces"),
    "has no events": (pickle.dumps({"device_traces": [[]]}), "_record_memory_history"),
    "lacks a field": (pickle.dumps({"device_traces": [[{"action": "alloc"}]]}), "KeyError"),
    "has words for sizes": (pickle.dumps(content(size="4096")), "TypeError"),
    "has negative sizes": (pickle.dumps(content(size=-1)), "negative"),
    "has sizes beyond any": (pickle.dumps(content(size=1 << 70)), "no snapshot"),
    "maps more than there is": (pickle.dumps(content(action="segment_map", size=1 << 60)), "any device"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_one_clear_error(
    read_bytes: Callable[[bytes], Any], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, reason = HOSTILE[case]
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(SnapshotError, match=reason):
        read_bytes(data)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert not capsys.readouterr().err


def test_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be read"):
        read(tmp_path / "none.pickle")


def test_endless_file_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="memory to read"):
        read(Path("/dev/zero"), limit_bytes=64 << 20)


def test_limit_beyond_any_memory_is_none(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content()))
    assert read(path, limit_bytes=1 << 80).histories
