"""Stand-ins for the outside world, shared by the tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from loadpeak.guard import Guard
from loadpeak.record import Line, Memory, Phase
from loadpeak.session import Session

MiB = 1 << 20
T = TypeVar("T", bound=Line)


class FakeClock:
    """A clock that only moves when told to, or by ``step`` at every reading."""

    def __init__(self, start: float = 1000.0, step: float = 0.0) -> None:
        self.now, self.step = start, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


class FakeAllocator:
    """A caching allocator in a few lines: live bytes, cached bytes, peaks since the last reset."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.allocated_peak = self.reserved_peak = 0
        self.retries = self.ooms = 0
        self.releases = 0
        self.conf: str | None = "expandable_segments:True"
        self.followers: list[Callable[[str], None]] = []

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self._keep_peaks()

    def hoard(self, size: int) -> None:
        """Reserve without using, as a cache that cannot serve the next request does."""
        self.reserved += size
        self._keep_peaks()

    def free(self, size: int) -> None:
        self.allocated -= size

    def _keep_peaks(self) -> None:
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def read(self) -> Memory:
        return Memory(
            allocated_bytes=self.allocated,
            reserved_bytes=self.reserved,
            inactive_split_bytes=0,
            allocated_peak_bytes=self.allocated_peak,
            reserved_peak_bytes=self.reserved_peak,
            retries=self.retries,
            ooms=self.ooms,
        )

    def reset_peaks(self) -> None:
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def settings(self) -> str | None:
        return self.conf

    def follow_settings(self, on_change: Callable[[str], None], guard: Guard) -> Callable[[], None]:
        self.followers.append(on_change)
        return self.followers.clear

    def change_settings(self, conf: str) -> None:
        """What a program does through PyTorch's setter."""
        self.conf = conf
        for told in self.followers:
            told(conf)

    def release(self) -> None:
        self.releases += 1
        self.reserved = self.allocated


class AbsentAllocator(FakeAllocator):
    """What a process without CUDA has."""

    def read(self) -> Memory:
        return Memory()

    def settings(self) -> str | None:
        return None


class Lines(list[Line]):
    """What was written, in order."""

    def of(self, kind: type[T]) -> list[T]:
        return [line for line in self if isinstance(line, kind)]

    def one(self, kind: type[T]) -> T:
        (line,) = self.of(kind)
        return line


@contextmanager
def phase_of(session: Session, phase: Phase) -> Iterator[None]:
    """A phase around a block."""
    session.start_phase(phase)
    try:
        yield
    finally:
        session.end_phase()
