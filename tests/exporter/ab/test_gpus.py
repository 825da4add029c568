"""The next startup waits until its GPUs are empty, and says who is in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loadpeak.sampler.devices import Nvml
from loadpeak_exporter.ab.gpus import Emptiness, Holder
from tests.fakes import FakeClock, MiB


class FakeGpus:
    """Use by UUID, from one reading to the next; the last one stays."""

    def __init__(self, *readings: dict[str, int], holders: list[Holder] | None = None) -> None:
        self.readings = list(readings)
        self.found = holders or []

    def used(self) -> dict[str, int]:
        return {uuid: used * MiB for uuid, used in self._next().items()}

    def _next(self) -> dict[str, int]:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def holders(self, uuid: str) -> list[Holder]:
        return self.found


def wait(gpus: FakeGpus, *uuids: str, limit: float = 60) -> tuple[str | None, list[str], float]:
    """What is left, what was said, and how long it took."""
    clock, said = FakeClock(0.0), list[str]()
    left = Emptiness(gpus, limit, clock, clock.sleep).wait(uuids, said.append)
    return left, said, clock.now


def test_as_empty_as_before_is_empty() -> None:
    assert wait(FakeGpus({"a": 500}, {"a": 530}), "a") == (None, [], 0)


def test_memory_that_is_given_back_late_is_waited_for() -> None:
    left, said, seconds = wait(FakeGpus({"a": 0}, {"a": 900}, {"a": 900}, {"a": 3}), "a")
    assert left is None
    assert said == ["a has 900 MiB in use, 0 before the experiment: no process that the driver names"]
    assert seconds == 1


def test_other_process_is_named_and_then_we_go_on() -> None:
    gpus = FakeGpus({"a": 10}, {"a": 2000}, holders=[Holder(71, 1990 * MiB), Holder(72, None)])
    left, said, seconds = wait(gpus, "a", limit=5)
    assert left == ("a has 2000 MiB in use, 10 before the experiment: process 71 (1990 MiB), process 72")
    assert said == [left]
    assert seconds == 5


def test_gpu_of_somebody_else_is_not_ours_to_wait_for() -> None:
    assert wait(FakeGpus({"a": 0, "b": 0}, {"a": 0, "b": 9000}), "a")[0] is None


def test_all_gpus_are_watched_where_no_run_told_which() -> None:
    assert wait(FakeGpus({"a": 0, "b": 0}, {"a": 0, "b": 9000}), limit=1)[0] is not None


def test_host_without_gpus_waits_for_nothing() -> None:
    assert wait(FakeGpus({})) == (None, [], 0)


class NvmlError(Exception):
    pass


@pytest.mark.parametrize("broken", [False, True])
def test_processes_on_a_gpu_come_from_nvml(broken: bool) -> None:
    def running(handle: str) -> list[Any]:
        if broken:
            raise NvmlError
        assert handle == "handle of GPU-a"
        return [
            SimpleNamespace(pid=7, usedGpuMemory=5 * MiB),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ]

    library = SimpleNamespace(
        nvmlInit=lambda: None,
        NVMLError=NvmlError,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetComputeRunningProcesses=running,
    )
    assert Nvml(library).processes("GPU-a") == ([] if broken else [(7, 5 * MiB), (8, None)])
