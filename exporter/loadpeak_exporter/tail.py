"""Read a JSON Lines file while it is written: each call returns what has been added."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadpeak.record import AnyLine, decode_line

CHUNK_BYTES = 4 << 20
"""Read at most so much at once."""
LINE_LIMIT_BYTES = 1 << 20
"""No line of ours is that long: one that is, is damage."""


class Damage(msgspec.Struct, frozen=True):
    """A place in a record that cannot be read. ``line_number`` counts from 1; 0 is the whole file."""

    file: str
    line_number: int
    reason: str


class Tail:
    """A journal that somebody may still be writing.

    A last line without an end is being written or was torn by a kill: it is left for the next call and
    is no damage. Anything else that cannot be decoded is noted in :attr:`damage` and passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modified_at_wall_seconds: float | None = None
        self.rewritten = False
        """Another file stands in its place, or it is shorter than it was: it has to be read anew."""
        self._inode: int | None = None
        self._offset = 0
        self._line_number = 0
        self._rest = b""
        self._damaged: list[Damage] = []
        self._unreadable: list[Damage] = []
        self._overlong = False
        """The line that :attr:`_rest` belongs to is longer than any of ours, and said to be."""

    @property
    def damage(self) -> list[Damage]:
        """The file as a whole, as long as it cannot be read, and the lines that could not be."""
        return self._unreadable + self._damaged

    @property
    def torn(self) -> bool:
        """Whether it ends within a line, as of the last look."""
        return bool(self._rest) or self._overlong

    def read(self) -> Iterator[AnyLine]:
        """Lines added since the last call, oldest first; none while the file is not there."""
        while True:
            data = self._chunk()
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                decoded = self._decode(line)
                if decoded is not None:
                    yield decoded
            if len(self._rest) > LINE_LIMIT_BYTES:
                if not self._overlong:
                    self._note(self._line_number + 1, f"is longer than {LINE_LIMIT_BYTES} bytes")
                self._overlong, self._rest = True, b""
            if len(data) < CHUNK_BYTES:
                return

    def _chunk(self) -> bytes:
        """What comes next, nothing at the end or where it cannot be read."""
        try:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            if self._inode not in (None, found.st_ino) or found.st_size < self._offset:
                self.rewritten = True
                return b""
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._unreadable = [Damage(self.path.name, 0, f"cannot be read: {error.strerror}")]
            return b""
        self._unreadable = []
        self._inode, self.modified_at_wall_seconds = found.st_ino, found.st_mtime
        self._offset += len(data)
        return data

    def _decode(self, data: bytes) -> AnyLine | None:
        self._line_number += 1
        overlong, self._overlong = self._overlong, False
        if overlong or not data:
            return None
        try:
            return decode_line(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._note(self._line_number, f"is not a line of a record that this loadpeak knows: {error}")
            return None

    def _note(self, line_number: int, reason: str) -> None:
        if len(self._damaged) < 100:
            self._damaged.append(Damage(self.path.name, line_number, reason))
