"""Which setting to use, and where the peak comes from: across the layers or inside one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import Literal, NamedTuple

from loadpeak.allocator.replay import LayerFigures, Outcome
from loadpeak.allocator.sizes import MIB
from loadpeak.whatif.questions import Answer, Question

_ALIKE = 0.01
"""Peaks within this share of each other count as the same."""
_CLOSE = 0.05
"""A peak within this share of the live one leaves nothing worth fixing."""

Where = Literal["nowhere", "unknown", "before", "across", "inside", "after"]


class Growth(NamedTuple):
    """Where the reserved memory above what is in use comes from.

    Attributes:
        where: ``across`` the layers, ``inside`` one, ``before`` the first, ``after`` the last, or
            ``nowhere`` if there is hardly any; ``unknown`` without layers.
        layer: ``across``: where the peak is reached; ``inside``: the layer that takes most.
        layer_bytes: ``across``: what a layer leaves behind as a rule; ``inside``: what that layer takes.
    """

    where: Where
    layer: int | None = None
    layer_bytes: int = 0


def growth(outcome: Outcome) -> Growth:
    """Where the peak of a replay comes from."""
    return locate(outcome.layers, outcome.complete)


def locate(windows: Sequence[LayerFigures], complete: bool = True) -> Growth:
    """Where the highest reserved memory comes from.

    Args:
        windows: what comes before the layers, the layers in the order of time, what comes after them.
        complete: whether the last window is what comes after the layers, not a layer that failed.
    """
    if not windows:
        return Growth("unknown")
    peak = max(window.reserved_peak_bytes for window in windows)
    if peak <= max(window.allocated_peak_bytes for window in windows) * (1 + _CLOSE):
        return Growth("nowhere")
    if len(windows) < 3:
        return Growth("unknown")
    place = next(place for place, window in enumerate(windows) if window.reserved_peak_bytes == peak)
    if place == 0:
        return Growth("before")
    if windows[place].layer is None and complete:
        return Growth("after")
    # The first window is what comes before the layers, so the second is the first layer.
    retained = [window.reserved_bytes - window.allocated_bytes for window in windows[:place]]
    left = [after - before for before, after in pairwise(retained)]
    usual = median_low(left) if left else 0
    most, widest = max(
        (after.reserved_peak_bytes - before.reserved_bytes, after.layer or 0)
        for before, after in pairwise(windows[: place + 1])
    )
    across, inside = usual * place, most - usual
    if retained[0] > max(across, inside):
        return Growth("before")
    if across > inside:
        return Growth("across", windows[place].layer, usual)
    return Growth("inside", widest, most)


def best(answers: Sequence[Answer], was: Question) -> Answer:
    """The answer to recommend: of those with the lowest peak, the one that changes and costs least.

    Only answers for the capacity of ``was`` are compared.
    """
    alike = [answer for answer in answers if answer.question.capacity_bytes == was.capacity_bytes]
    candidates = [answer for answer in alike if answer.fits is not False] or alike
    lowest = min(answer.outcome.peak_reserved_bytes for answer in candidates)
    return min(
        (answer for answer in candidates if answer.outcome.peak_reserved_bytes <= lowest * (1 + _ALIKE)),
        key=lambda answer: (
            len(_changes(answer.question, was)),
            answer.outcome.calls,
            answer.outcome.peak_reserved_bytes,
        ),
    )


def _changes(question: Question, was: Question) -> list[str]:
    """What to set to get from the recorded run to another combination."""
    changes: list[str] = []
    if question.alloc_conf != was.alloc_conf:
        changes.append(f"PYTORCH_CUDA_ALLOC_CONF={question.alloc_conf or repr('')}")
    if question.release != was.release:
        changes.append(f"LOADPEAK_CACHE_RELEASE={question.release}")
    if question.keep_split_limit != was.keep_split_limit:
        changes.append("LOADPEAK_SPLIT_LIMIT=keep")
    return changes


def recommendation(answers: Sequence[Answer], before: Answer) -> str:
    """One sentence: what to set, what that does to the peak, and why it was as high as it was.

    Args:
        answers: to choose from.
        before: the recorded settings, under a capacity that was asked.
    """
    chosen = best(answers, before.question)
    what = " and ".join(_changes(chosen.question, before.question))
    old, new = before.outcome.peak_reserved_bytes, chosen.outcome.peak_reserved_bytes
    reason = cause(growth(before.outcome))
    if chosen.fits is False:
        capacity, live = chosen.question.capacity_bytes or 0, chosen.outcome.peak_allocated_bytes
        return (
            f"Nothing that was asked fits into {_mib(capacity)}, "
            f"with {_mib(live)} in use when a request fails; as it was, {reason}."
        )
    if what and before.fits is False:
        spare = "" if chosen.margin_bytes is None else f" with {_mib(chosen.margin_bytes)} to spare"
        return f"Set {what}: it fits then{spare}, at a peak of {_mib(new)}; as it was, {reason}."
    if what and new < old * (1 - _ALIKE):
        share = f"{(old - new) / old:.0%}"
        return f"Set {what}: the peak falls from {_mib(old)} to {_mib(new)}, by {share}; as it was, {reason}."
    return (
        f"Leave the settings as they were: nothing that was asked lowers the peak of {_mib(old)}; {reason}."
    )


def cause(found: Growth) -> str:
    """Where the peak comes from, in words that go into the middle of a sentence."""
    size, layer = _mib(found.layer_bytes), found.layer
    return {
        "nowhere": "the peak is what the program itself has in use",
        "unknown": "where it grows is not known, because no layers were recorded or found",
        "before": "the peak lies before the first layer is converted, where no release per layer can help",
        "across": f"the cache grows across the layers, by {size} a layer up to layer {layer}",
        "inside": f"the peak grows inside layer {layer}, by {size}, and not from layer to layer",
        "after": "the peak lies after the last layer",
    }[found.where]


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
