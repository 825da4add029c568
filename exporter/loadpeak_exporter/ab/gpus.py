"""Wait until the GPUs that an engine used are as empty as before, and say who holds memory if not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from loadpeak.sampler.devices import Nvml

TOLERANCE_BYTES = 64 << 20
"""What may differ in an empty GPU's use."""
POLL_SECONDS = 0.5
MIB = 1 << 20


class Holder(NamedTuple):
    """A process with memory on a GPU; how much is missing where the driver does not tell."""

    pid: int
    used_bytes: int | None


class Gpus(Protocol):
    """What is read of the host's GPUs."""

    def used(self) -> Mapping[str, int]:
        """Bytes in use by UUID."""

    def holders(self, uuid: str) -> Iterable[Holder]:
        """The processes on a GPU."""


class NvmlGpus:
    """The GPUs of this host through NVML; none where there is no NVML."""

    def __init__(self) -> None:
        try:
            self._nvml: Nvml | None = Nvml()
        except Exception:  # noqa: BLE001 - NVML has its own errors, and may be missing in several ways
            self._nvml = None

    def used(self) -> dict[str, int]:
        """Bytes in use by UUID; a GPU that does not tell is left out."""
        if self._nvml is None:
            return {}
        readings = {device.uuid: read() for device, read in self._nvml.all()}
        return {uuid: used for uuid, used in readings.items() if uuid is not None and used is not None}

    def holders(self, uuid: str) -> list[Holder]:
        """The processes on a GPU."""
        return [] if self._nvml is None else [Holder(*found) for found in self._nvml.processes(uuid)]


class Emptiness:
    """How much of each GPU was in use before the experiment, and how long we wait for that to come back."""

    def __init__(
        self,
        gpus: Gpus,
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gpus, self._limit, self._clock, self._sleep = gpus, limit_seconds, clock, sleep
        self._before = dict(gpus.used())

    def wait(self, uuids: Iterable[str], say: Callable[[str], None]) -> str | None:
        """Wait until these GPUs (all, where none are given) are as empty as before.

        Args:
            uuids: the GPUs that the engines used so far.
            say: told who is in the way, each time that changes.

        Returns:
            What still held memory at the end of our patience, if so.
        """
        watched = set(uuids) or set(self._before)
        deadline = self._clock() + self._limit
        said = None
        while True:
            full = {
                uuid: used
                for uuid, used in self._gpus.used().items()
                if uuid in watched and used > self._before.get(uuid, 0) + TOLERANCE_BYTES
            }
            if not full:
                return None
            text = "; ".join(self._describe(uuid, used) for uuid, used in sorted(full.items()))
            if self._clock() >= deadline:
                return text
            if text != said:
                said = text
                say(text)
            self._sleep(POLL_SECONDS)

    def _describe(self, uuid: str, used: int) -> str:
        before = self._before.get(uuid, 0)
        holders = [
            f"process {holder.pid}" + (f" ({holder.used_bytes // MIB} MiB)" if holder.used_bytes else "")
            for holder in self._gpus.holders(uuid)
        ]
        who = ", ".join(holders) or "no process that the driver names"
        return f"{uuid} has {used // MIB} MiB in use, {before // MIB} before the experiment: {who}"
