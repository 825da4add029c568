"""What a rank's memory did over time, and its short form for a chart."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

from loadpeak.record import Phase

Point = tuple[float, int | None]
"""Seconds since the start of the rank, and bytes; ``None`` where there was no reading."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One occurrence of a phase, in seconds since the start of the rank; without an end while it lasts."""

    phase: Phase
    from_seconds: float
    to_seconds: float | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's memory over time, with at most so many points a curve: each shows its interval's highest."""

    rank: int
    device_used_bytes: tuple[Point, ...]
    allocated_bytes: tuple[Point, ...]
    reserved_bytes: tuple[Point, ...]
    phases: tuple[Span, ...]


class History:
    """Collects readings as lines come in.

    A device value is in force until the next one. Of the allocator there is a reading at each end of a
    phase and of a conversion, and the peak between them in its middle.
    """

    def __init__(self) -> None:
        self.device_times: list[float] = []
        self.device_values: list[int | None] = []
        self._allocator_times: list[float] = []
        self._allocated: list[int | None] = []
        self._reserved: list[int | None] = []
        self._spans: list[tuple[Phase, float, float | None]] = []

    def allocator(self, at_seconds: float, allocated: int | None, reserved: int | None) -> None:
        """One reading of the allocator."""
        if reserved is not None:
            self._allocator_times.append(at_seconds)
            self._allocated.append(allocated)
            self._reserved.append(reserved)

    def begin(self, phase: Phase, at_seconds: float) -> None:
        """A phase begins."""
        self._spans.append((phase, at_seconds, None))

    def end(self, at_seconds: float) -> None:
        """The phase that began last is over."""
        if self._spans:
            phase, began, _ = self._spans[-1]
            self._spans[-1] = (phase, began, at_seconds)

    def timeline(self, rank: int, start_seconds: float, points: int) -> Timeline:
        """The short form.

        Args:
            rank: number of the rank.
            start_seconds: the clock when the rank began.
            points: how many points a curve has at most.
        """
        return Timeline(
            rank=rank,
            device_used_bytes=thin(self.device_times, self.device_values, start_seconds, points),
            allocated_bytes=thin(self._allocator_times, self._allocated, start_seconds, points),
            reserved_bytes=thin(self._allocator_times, self._reserved, start_seconds, points),
            phases=tuple(
                Span(
                    phase=phase,
                    from_seconds=round(began - start_seconds, 3),
                    to_seconds=None if ended is None else round(ended - start_seconds, 3),
                )
                for phase, began, ended in self._spans[:1000]
            ),
        )


def thin(
    times: Sequence[float], values: Sequence[int | None], start_seconds: float, points: int
) -> tuple[Point, ...]:
    """At most so many points: the highest of each of as many equal intervals of time, where it stood."""
    if len(times) <= points:
        chosen = list(range(len(times)))
    else:
        chosen = []
        first, width = times[0], (times[-1] - times[0]) / points
        begin = 0
        for number in range(1, points + 1):
            end = len(times) if number == points else bisect.bisect_left(times, first + number * width)
            if end > begin:
                chosen.append(max(range(begin, end), key=lambda index: values[index] or -1))
                begin = end
    return tuple((round(times[index] - start_seconds, 3), values[index]) for index in chosen)
