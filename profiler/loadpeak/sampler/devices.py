"""What a sampler can read: a GPU through NVML, or the resident memory of a process.

A source is a callable that returns the bytes in use now, or nothing when the reading failed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loadpeak.record import Device

Source = Callable[[], int | None]


class Nvml:
    """NVML through nvidia-ml-py. Handles are by UUID: indices depend on CUDA_VISIBLE_DEVICES and MIG.

    NVML's second memory query tells what the driver keeps for itself apart from what is used. That part
    is left out of the total, so that used is what ``nvidia-smi`` shows, the total is what CUDA can
    allocate, and their difference is what is free. Drivers that only know the first query count their
    own part as used.
    """

    def __init__(self, library: Any = None) -> None:
        """Start NVML.

        Args:
            library: stands in for the module ``pynvml``.

        Raises:
            Exception: there is no NVML here; the text says why.
        """
        self._library = library or importlib.import_module("pynvml")
        self._library.nvmlInit()

    def all(self) -> Iterator[tuple[Device, Source]]:
        """Every whole GPU that the driver shows; one that cannot be asked is left out."""
        library = self._library
        for index in range(library.nvmlDeviceGetCount()):
            try:
                yield self._describe(library.nvmlDeviceGetHandleByIndex(index), index)
            except library.NVMLError:
                continue

    def by_uuid(self, uuid: str) -> tuple[Device, Source]:
        """The GPU or MIG device of this UUID.

        Raises:
            LookupError: it cannot be read; the text says why.
        """
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            device, read = self._describe(handle, None)
            if not uuid.startswith("MIG-") and self._is_split(handle):
                raise LookupError(
                    f"{uuid} is split into MIG devices and CUDA_VISIBLE_DEVICES does not name the one in use"
                )
        except library.NVMLError as error:
            raise LookupError(f"NVML cannot read {uuid}: {error}") from error
        if read() is None:
            raise LookupError(f"NVML knows {uuid} but does not tell its memory")
        return device, read

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        """Process ids on a GPU with their bytes, which are missing where the driver does not tell them."""
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            found = library.nvmlDeviceGetComputeRunningProcesses(handle)
        except library.NVMLError:
            return []
        return [(int(process.pid), process.usedGpuMemory) for process in found]

    def _is_split(self, handle: Any) -> bool:
        try:
            current: int = self._library.nvmlDeviceGetMigMode(handle)[0]
        except self._library.NVMLError:
            return False
        return current == 1

    def _describe(self, handle: Any, index: int | None) -> tuple[Device, Source]:
        library = self._library

        def query() -> Any:
            try:
                return library.nvmlDeviceGetMemoryInfo(handle, library.nvmlMemory_v2)
            except (library.NVMLError, AttributeError):
                return library.nvmlDeviceGetMemoryInfo(handle)

        def read() -> int | None:
            try:
                return int(query().used)
            except library.NVMLError:
                return None

        try:
            memory = query()
            total: int | None = int(memory.total) - int(getattr(memory, "reserved", 0))
        except library.NVMLError:
            total = None
        if index is None:
            try:
                index = int(library.nvmlDeviceGetIndex(handle))
            except library.NVMLError:
                index = None
        return (
            Device(
                kind="nvml",
                name=_text(library.nvmlDeviceGetName(handle)),
                uuid=_text(library.nvmlDeviceGetUUID(handle)),
                index=index,
                total_bytes=total,
            ),
            read,
        )


def resident(pid: int, proc: Path = Path("/proc")) -> tuple[Device, Source]:
    """The resident memory of a process, from ``/proc/PID/statm`` (its second field, in pages).

    Missing once the process is ending, when the file is empty of pages or gone.
    """
    path = proc / str(pid) / "statm"
    page = os.sysconf("SC_PAGE_SIZE")

    def read() -> int | None:
        try:
            return int(path.read_bytes().split()[1]) * page or None
        except (OSError, IndexError, ValueError):
            return None

    return Device(kind="resident", name="resident memory of the process"), read


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
