"""Guess where one layer's conversion ends and the next begins, from the history alone.

Layers repeat: each conversion asks for the same sizes in the same order. The largest size that returns at
even distances through most of the history marks the layers. A layer is over where, after its mark, the least
memory is in use: its source weights are gone then, and nothing of the next layer is there yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from loadpeak.allocator.history import History
from loadpeak.allocator.replay import Boundary
from loadpeak.allocator.settings import AllocatorSettings
from loadpeak.allocator.sizes import SMALL_LIMIT, block_size

_FEWEST = 4
"""Layers that a guess needs: with fewer, any few allocations of a size look like some."""
_SHARE = 0.3
"""Part of all operations that the layers have to cover."""
_DEFAULTS = AllocatorSettings()


def infer(history: History) -> list[Boundary]:
    """The ends of the layers, taken to hold experts; empty where nothing repeats."""
    marks = _marks(history.operations)
    if not marks:
        return []
    distance = int(median(after - before for before, after in pairwise(marks)))
    in_use = _in_use(history)
    ends = [
        mark + 1 + _lowest(in_use[mark + 1 : following + 1])
        for mark, following in pairwise([*marks, min(marks[-1] + distance, len(history.operations))])
    ]
    places = [*history.events, len(history.times_us)]
    events = [places[end] for end in (max(ends[0] - distance, 0), *ends)]
    return [Boundary(begin, end, layer, moe=True) for layer, (begin, end) in enumerate(pairwise(events))]


def _lowest(levels: Sequence[int]) -> int:
    return levels.index(min(levels)) if levels else 0


def _marks(operations: Sequence[int]) -> Sequence[int]:
    """Places of one allocation in each layer."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, operation in enumerate(operations):
        if operation > SMALL_LIMIT:
            places[operation].append(place)
    for size in sorted(places, reverse=True):
        run = _longest_even_run(places[size])
        if len(run) >= _FEWEST and run[-1] - run[0] >= _SHARE * len(operations):
            return run
    return []


def _longest_even_run(places: Sequence[int]) -> Sequence[int]:
    """The consecutive places that cover most, with no distance twice or half of the one before."""
    distances = [after - before for before, after in pairwise(places)]
    runs: list[tuple[int, int]] = []
    begin = 0
    for place in range(1, len(distances)):
        if not _alike(distances[place - 1], distances[place]):
            runs.append((begin, place))
            begin = place
    runs.append((begin, len(distances)))
    begin, end = max(runs, key=lambda run: places[run[1]] - places[run[0]])
    # A run begins where the one before it ends. If that one has even distances too, the place is its: the
    # weights of all layers are created one after the other, right before the first layer is converted.
    if any(run[1] == begin and run[1] - run[0] > 1 for run in runs):
        begin += 1
    if any(run[0] == end and run[1] - run[0] > 1 for run in runs):
        end -= 1
    return places[begin : end + 1]


def _alike(first: int, second: int) -> bool:
    return 0.5 < second / first < 2


def _in_use(history: History) -> list[int]:
    """Bytes in use before each operation, and after the last."""
    sizes = [0] * len(history.start.blocks)

    def change(operation: int) -> int:
        if operation < 0:
            return -sizes[~operation]
        sizes.append(block_size(operation, _DEFAULTS))
        return sizes[-1]

    return list(accumulate(map(change, history.operations), initial=0))
