"""Append lines to a file so that none is lost when the process is killed.

Each line is one ``write`` on a descriptor in append mode: once it has returned, the line belongs to
the kernel and outlives the process. Nothing is synced to the disk, so a crash of the machine itself
may cost the last seconds.
"""

import os
from pathlib import Path

from loadpeak.record import Line, encode_line


class Journal:
    """One file that only this process appends to.

    A write that fails (a full disk, a folder that became read-only) loses that line, is counted in
    ``lost`` and never raises: the engine matters more than its record.
    """

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            FileExistsError: somebody else writes this journal already.
            OSError: the folder cannot be written.
        """
        self.path = path
        self.lost = 0
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )
        self._torn = False

    def append(self, line: Line) -> None:
        """Write one line."""
        data = encode_line(line)
        if self._torn:
            data = b"\n" + data
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            self.lost += 1
            return
        self._torn = written < len(data)
        self.lost += self._torn

    def close(self) -> None:
        """Close the file; further lines are lost."""
        os.close(self._descriptor)
        self._descriptor = -1
