"""PromQL, as functions. Metric names come from the catalogue; a name that it lacks is an error here.

A run may be scraped twice, from inside the engine and from the host service, so everything is taken
as the highest over ``job`` and ``instance`` (:func:`each`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadpeak.record import LOAD_PHASES
from loadpeak_exporter.catalogue import CATALOGUE

_NAMES = {metric.name for metric in CATALOGUE}
RUN = ("host", "run", "variant")
RANK = (*RUN, "rank", "gpu")


def metric(name: str, **labels: str) -> str:
    """A selector: ``metric("layers", run="$run")``; a label that ends in ``__re`` is matched.

    Raises:
        KeyError: the catalogue has no such metric.
    """
    full = f"loadpeak_{name}"
    if full not in _NAMES:
        raise KeyError(f"{full} is not in the metric catalogue")
    matchers = [
        f'{label.removesuffix("__re")}{"=~" if label.endswith("__re") else "="}"{value}"'
        for label, value in labels.items()
    ]
    return full + (f"{{{','.join(matchers)}}}" if matchers else "")


def load_peak(**labels: str) -> str:
    """Device peaks before the KV cache, which takes all that its engine was told to use."""
    return metric("device_used_peak_bytes", phase__re="|".join(LOAD_PHASES), **labels)


def load_headroom(*by: str, range_of: Callable[[str], str] = str, **labels: str) -> str:
    """What the load peaks leave of the device: of the rank with least, by labels.

    Args:
        by: labels to keep.
        range_of: wraps each selector, for example :func:`during_range`.
        labels: of the selectors.
    """
    total = each(range_of(metric("device_total_bytes", **labels)), *RANK)
    return each(f"{total} - {each(range_of(load_peak(**labels)), *RANK)}", *by, of="min")


def cache_flushes(*by: str, **labels: str) -> str:
    """Allocator retries within the dashboard's range, over the ranks, whoever scraped them."""
    ranks = each(during_range(metric("allocator_retries_total", **labels)), *RANK)
    return each(ranks, *by, of="sum")


def each(selector: str, *labels: str, of: str = "max") -> str:
    """One series for each combination of labels, whoever scraped it."""
    return f"{of} by ({', '.join(labels)}) ({selector})"


def numbered(label: str, values: Sequence[str]) -> str:
    """A series for each value of a label, whose own value is its place: to sort by."""
    return " or ".join(
        f'label_replace(vector({number}), "{label}", "{value}", "", "")'
        for number, value in enumerate(values)
    )


def during_range(selector: str, of: str = "max") -> str:
    """What a series was within the dashboard's range: also when the run has left ``/metrics`` since."""
    return f"{of}_over_time({selector}[$__range])"


def while_loading(selector: str, **labels: str) -> str:
    """A series of ranks, where their run is loading: runs that have ended stay on ``/metrics`` for a day."""
    loading = during_step(metric("run_outcome", outcome="loading", **labels))
    return f"({selector} and on (host, run) ({loading} == 1))"


def during_step(selector: str, of: str = "max") -> str:
    """A series whose peaks survive down-sampling: each point is the highest of its step."""
    return f"{of}_over_time({selector}[$__interval])"


def last(selector: str) -> str:
    """The last value within the dashboard's range."""
    return f"last_over_time({selector}[$__range])"


def recently(series: str, minutes: int) -> str:
    """Whether a 0/1 series was 1 at any time within the last minutes."""
    return f"max_over_time({series}[{minutes}m]) == 1"


def newly(selector: str, minutes: int, *labels: str) -> str:
    """Where a 0/1 series is 1 now and was not so many minutes ago, by labels."""
    now, before = each(selector, *labels), each(f"{selector} offset {minutes}m", *labels)
    return f"({now} == 1) unless ({before} == 1)"
