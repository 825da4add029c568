"""A recorded history as compact operations, which is all that a replay needs of it.

PyTorch's history tells what the program asked for (``alloc``, ``free_requested``, ``free_completed``) and
what the allocator did about it (``segment_alloc`` and the like). A replay keeps the first and does the second
anew. Memory that is given back may be either: see :mod:`loadpeak.allocator.releases`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate
from typing import Any, NamedTuple

from loadpeak.allocator.model import DEFAULT_POOL, Lane
from loadpeak.allocator.releases import Burst, judge
from loadpeak.allocator.settings import AllocatorSettings
from loadpeak.allocator.sizes import LARGE_SEGMENT, SMALL_SEGMENT
from loadpeak.allocator.start import FoundFree, Start, reconstruct

Event = Mapping[str, Any]
"""An entry of a snapshot's ``device_traces``."""


class Do(Enum):
    """What a program does besides allocating and freeing."""

    EMPTY_CACHE = auto()
    USE_LANE = auto()
    """The next requests come from another stream or private pool; the value is the lane."""
    ASK_FREE = auto()
    """A block is no longer wanted but another stream still uses it; the value is its number."""
    FREE = auto()
    """That use is over."""
    TRY = auto()
    """A request that failed in the recorded run; the value is its size."""


class Step(NamedTuple):
    """Something that happens before the operation at ``at``; ``event`` is its place in the history."""

    event: int
    at: int
    do: Do
    value: Any = None


class SegmentEvent(NamedTuple):
    """What the recorded allocator asked of the device."""

    event: int
    action: str
    size: int
    address: int
    stream: int = 0

    @property
    def of_small_pool(self) -> bool:
        """Whether the small pool gave it back, by its size."""
        if self.action == "segment_free":
            return self.size == SMALL_SEGMENT
        return self.size % LARGE_SEGMENT != 0

    @property
    def change_bytes(self) -> int:
        """What it added to the reserved memory, negative where it gave back."""
        return self.size if self.action in ("segment_alloc", "segment_map") else -self.size


class History(NamedTuple):
    """One device's history.

    Blocks are numbered: first those that were there at the start, then each allocation in turn.

    Attributes:
        device: its index.
        operations: requested bytes for an allocation, the complement of a block's number for a free.
        events: the place of each operation in the recorded history.
        times_us: the time of each recorded event, microseconds since 1970.
        steps: what else the program did, in order; its calls of ``empty_cache`` only after :meth:`judged`.
        bursts: releases of cached memory by whomever.
        start: what was there before.
        segment_events: what the recorded allocator did.
        recorded_peak_bytes: the most it had reserved.
        limit_bytes: so much it could not have, if it ever found no memory; known after :meth:`judged`.
        retries: how often it gave everything back and tried again; likewise.
    """

    device: int
    operations: array[int]
    events: array[int]
    times_us: array[int]
    steps: tuple[Step, ...]
    bursts: tuple[Burst, ...]
    start: Start
    segment_events: tuple[SegmentEvent, ...]
    recorded_peak_bytes: int
    limit_bytes: int | None = None
    retries: int = 0

    def operation_at(self, event: int) -> int:
        """The first operation at or after a place in the recorded history."""
        return bisect_left(self.events, event)

    def event_after(self, time_us: int) -> int:
        """The first place in the recorded history that is later than a time."""
        return bisect_left(self.times_us, time_us + 1)

    def judged(self, settings_at: Callable[[int], AllocatorSettings]) -> History:
        """The same with its releases told apart: see :mod:`loadpeak.allocator.releases`.

        Args:
            settings_at: the settings that were in force at a place in the recorded history.
        """
        verdict = judge(self.bursts, self.recorded_peak_bytes, settings_at)
        emptied = [Step(burst.event, burst.at, Do.EMPTY_CACHE) for burst in verdict.by_program]
        steps = sorted([*self.steps, *emptied], key=lambda step: step.event)
        return self._replace(
            steps=tuple(steps), bursts=(), limit_bytes=verdict.limit_bytes, retries=verdict.retries
        )


def from_trace(device: int, trace: Sequence[Event], segments: Sequence[Event] = ()) -> History:
    """Compact one device's trace.

    Args:
        device: its index.
        trace: entries of ``device_traces`` in a snapshot.
        segments: the snapshot's segments of this device: what was there when it was taken.

    Raises:
        KeyError: an entry lacks a field.
        TypeError: a field has the wrong type.
        ValueError: the entries contradict each other.
    """
    reader = _Reader(segments)
    for place, event in enumerate(trace):
        action = event["action"]
        if action == "alloc":
            reader.alloc(place, event)
        elif action == "free_requested":
            following = trace[place + 1] if place + 1 < len(trace) else None
            if following is None or following["action"] != "free_completed":
                reader.ask_free(place, event)
        elif action == "free_completed":
            reader.free(place, event)
        elif action.startswith("segment_"):
            reader.segment_event(SegmentEvent(place, action, event["size"], event["addr"], event["stream"]))
        elif action == "oom":
            reader.out_of_memory(place, event)
    start = reconstruct(reader.segment_events, segments, reader.found_free, reader.live)
    return reader.history(device, start, array("q", [event["time_us"] for event in trace]))


class _Reader:
    """The state of one pass over a trace."""

    def __init__(self, segments: Sequence[Event]) -> None:
        self.operations, self.events = array("q"), array("q")
        self.steps: list[Step] = []
        self.segment_events: list[SegmentEvent] = []
        self.live: dict[int, int] = {}
        """Number of each block that is in use, by its address."""
        self.found_free: list[FoundFree] = []
        """Frees of blocks that were there at the start."""
        self._asked: set[int] = set()
        self._allocations = 0
        self._lane: Lane = (0, DEFAULT_POOL)
        self._lane_of = _lane_finder(segments)
        self._reserved = 0
        self._burst: Burst | None = None
        self._bursts: list[Burst] = []

    def alloc(self, place: int, event: Event) -> None:
        size: int = event["size"]
        if size < 0:
            raise ValueError("an allocation has a negative size")
        if self._burst is not None:
            self._end_burst(requested_bytes=size)
        lane = self._lane_of(event)
        if lane != self._lane:
            self._lane = lane
            self.steps.append(Step(place, len(self.operations), Do.USE_LANE, lane))
        self.live[event["addr"]] = self._allocations
        self._allocations += 1
        self.operations.append(size)
        self.events.append(place)

    def ask_free(self, place: int, event: Event) -> None:
        number = self.live.get(event["addr"])
        if number is not None:
            self._asked.add(number)
            self.steps.append(Step(place, len(self.operations), Do.ASK_FREE, number))

    def free(self, place: int, event: Event) -> None:
        if self._burst is not None:
            self._end_burst()
        number = self.live.pop(event["addr"], None)
        if number is None:
            found = FoundFree(len(self.operations), event["addr"], event["size"], self._lane_of(event))
            self.found_free.append(found)
            number = 0
        elif number in self._asked:
            self.steps.append(Step(place, len(self.operations), Do.FREE, number))
            return
        self.operations.append(~number)
        self.events.append(place)

    def segment_event(self, event: SegmentEvent) -> None:
        if event.change_bytes < 0:
            burst = self._burst or Burst(event.event, len(self.operations), self._reserved)
            self._burst = burst.with_piece(event.size, event.of_small_pool)
        self._reserved += event.change_bytes
        self.segment_events.append(event)

    def out_of_memory(self, place: int, event: Event) -> None:
        self.steps.append(Step(place, len(self.operations), Do.TRY, event["size"]))
        self._burst = self._burst or Burst(place, len(self.operations), self._reserved)
        self._end_burst(reserved_bytes=self._reserved, requested_bytes=event["size"], failed=True)

    def _end_burst(self, **what: Any) -> None:
        assert self._burst is not None, "only called within a burst"
        self._bursts.append(self._burst._replace(**what))
        self._burst = None

    def history(self, device: int, start: Start, times_us: array[int]) -> History:
        """All of it, with the blocks of the start numbered first."""
        if self._burst is not None:
            self._end_burst()
        shift, reserved = len(start.blocks), start.reserved_bytes
        if shift:
            self.operations = array("q", [op - shift if op < 0 else op for op in self.operations])
            for operation, number in start.frees:
                self.operations[operation] = ~number
        numbered = (Do.ASK_FREE, Do.FREE)
        levels = accumulate((event.change_bytes for event in self.segment_events), initial=reserved)
        return History(
            device=device,
            operations=self.operations,
            events=self.events,
            times_us=times_us,
            steps=tuple(
                step._replace(value=step.value + shift) if step.do in numbered else step
                for step in self.steps
            ),
            bursts=tuple(
                burst._replace(reserved_bytes=burst.reserved_bytes + reserved) for burst in self._bursts
            ),
            start=start,
            segment_events=tuple(self.segment_events),
            recorded_peak_bytes=max(levels),
        )


def _lane_finder(segments: Sequence[Event]) -> Callable[[Event], Lane]:
    """Tells the stream and the private pool of an event.

    Newer histories name the pool; for older ones the snapshot's segments tell where each pool lies.
    """
    private = sorted(
        (segment["address"], segment["address"] + segment["total_size"], tuple(segment["segment_pool_id"]))
        for segment in segments
        if tuple(segment.get("segment_pool_id", DEFAULT_POOL)) != DEFAULT_POOL
    )
    begins = [begin for begin, _, _ in private]

    def lane_of(event: Event) -> Lane:
        if "pool_id" in event:
            return event["stream"], tuple(event["pool_id"])
        place = bisect_left(begins, event["addr"] + 1) - 1
        if place >= 0 and event["addr"] < private[place][1]:
            return event["stream"], private[place][2]
        return event["stream"], DEFAULT_POOL

    return lane_of
