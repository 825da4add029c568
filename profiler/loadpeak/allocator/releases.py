"""Who gave cached memory back in a recorded history: the program, or the allocator in need of it.

The history shows segments that go back, not why. What the program did (``empty_cache``) belongs to every
replay; what the allocator did itself depends on the settings, and a replay decides it anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from loadpeak.allocator.settings import AllocatorSettings
from loadpeak.allocator.sizes import block_size, segment_size

_DEFAULTS = AllocatorSettings()


class Burst(NamedTuple):
    """Consecutive releases.

    Attributes:
        event: the place of the first in the history.
        at: the operation that comes next.
        reserved_bytes: what was reserved before; after them where the request failed all the same.
        requested_bytes: the request that came next, or nothing where something else did.
        failed: whether that request ended in an out-of-memory error.
    """

    event: int
    at: int
    reserved_bytes: int
    requested_bytes: int | None = None
    failed: bool = False

    @property
    def needed_bytes(self) -> int:
        """What would have been reserved had the request been served without a release."""
        size = block_size(self.requested_bytes or 0, _DEFAULTS)
        return self.reserved_bytes + segment_size(size, _DEFAULTS)


def by_allocator(bursts: Iterable[Burst], peak_bytes: int, collects: bool) -> tuple[Burst, ...]:
    """Those that the allocator made itself, inside a request that found no memory.

    It gives back and tries again only when a request does not fit. So a burst is its own only if a request
    came next, and if serving that request without it would have gone above everything that was ever
    reserved: had that much been had at another time, there would have been room this time too.

    Args:
        bursts: all of them.
        peak_bytes: the most that was reserved at any time.
        collects: whether a garbage collection threshold was set; then any request may be preceded by one.
    """
    return tuple(
        burst
        for burst in bursts
        if burst.requested_bytes is not None
        and (burst.failed or collects or burst.needed_bytes > peak_bytes)
    )
