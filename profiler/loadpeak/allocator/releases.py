"""Who gave cached memory back in a recorded history: the program, or the allocator in need of it.

The history shows segments that go back, not why. What the program did (``empty_cache``) belongs to every
replay; what the allocator did itself depends on the settings, and a replay decides it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadpeak.allocator.settings import AllocatorSettings
from loadpeak.allocator.sizes import SMALL_LIMIT, block_size, segment_size


class Burst(NamedTuple):
    """Consecutive releases, or a request that failed with nothing to release.

    Attributes:
        event: the place of the first in the history.
        at: the operation that comes next.
        reserved_bytes: what was reserved before; after them where the request failed all the same.
        largest_small: the largest piece that the small pool gave back.
        largest_large: the largest piece that the large pool gave back.
        requested_bytes: the request that came next, or nothing where something else did.
        failed: whether that request ended in an out-of-memory error.
    """

    event: int
    at: int
    reserved_bytes: int
    largest_small: int = 0
    largest_large: int = 0
    requested_bytes: int | None = None
    failed: bool = False

    def with_piece(self, size: int, small: bool) -> Burst:
        """One more piece."""
        if small:
            return self._replace(largest_small=max(self.largest_small, size))
        return self._replace(largest_large=max(self.largest_large, size))


class Verdict(NamedTuple):
    """What became of the bursts.

    Attributes:
        by_program: those that are calls of ``empty_cache``.
        retries: how often the allocator gave everything back and tried again.
        limit_bytes: so much could not be reserved, if a request ever found no memory.
    """

    by_program: tuple[Burst, ...]
    retries: int
    limit_bytes: int | None


def judge(
    bursts: Sequence[Burst], peak_bytes: int, settings_at: Callable[[int], AllocatorSettings]
) -> Verdict:
    """Tell the program's releases from the allocator's own.

    The allocator gives back and tries again only when a request finds no memory. So a burst is its own only
    if a request came next, if no block that was given back could have served it, and if serving it without
    the release would have gone above everything that was ever reserved: had that much been had at another
    time, there would have been room this time too. With a garbage collection threshold, any request may be
    preceded by releases.

    Args:
        bursts: all of them.
        peak_bytes: the most that was reserved at any time.
        settings_at: the settings in force at a place in the history.
    """
    by_program: list[Burst] = []
    limits: list[int] = []
    for burst in bursts:
        settings = settings_at(burst.event)
        if burst.requested_bytes is None:
            by_program.append(burst)
            continue
        size = block_size(burst.requested_bytes, settings)
        needed = burst.reserved_bytes + segment_size(size, settings)
        if burst.failed or (needed > peak_bytes and not _could_serve(burst, size, settings)):
            limits.append(needed)
        elif not settings.garbage_collection_threshold:
            by_program.append(burst)
    return Verdict(tuple(by_program), len(limits), min(limits, default=None))


def _could_serve(burst: Burst, size: int, settings: AllocatorSettings) -> bool:
    """Whether a block that was given back could have served a request (``get_free_block``)."""
    piece = burst.largest_small if size <= SMALL_LIMIT else burst.largest_large
    limit = settings.max_split_bytes
    if size < limit <= piece:
        return False
    return piece >= size
