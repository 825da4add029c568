"""Histories made by hand, event by event, as PyTorch would record them."""

from __future__ import annotations

import itertools
from typing import Any

from loadpeak.allocator.history import History, from_trace
from loadpeak.allocator.settings import AllocatorSettings

Event = dict[str, Any]


class Recorder:
    """Events of one device; addresses and times are given where they are left out."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._address = itertools.count(1 << 30, 1 << 30)
        self._time = itertools.count(1_000_000)

    def add(self, action: str, size: int, address: int | None = None, **more: Any) -> int:
        at = next(self._address) if address is None else address
        event = {"action": action, "addr": at, "size": size, "stream": 0, "time_us": next(self._time)}
        self.events.append({**event, **more})
        return at

    def alloc(self, size: int, **more: Any) -> int:
        return self.add("alloc", size, **more)

    def free(self, address: int, size: int, **more: Any) -> None:
        self.add("free_requested", size, address, **more)
        self.add("free_completed", size, address, **more)

    def history(self, segments: list[Event] | None = None, **settings: Any) -> History:
        in_force = AllocatorSettings(**settings)
        return from_trace(0, self.events, segments or []).judged(lambda event: in_force)
