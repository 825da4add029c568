"""A prometheus_client collector over records of runs. It keeps nothing and registers nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loadpeak_exporter.catalogue import CATALOGUE, COMMON_LABELS, gpu_label, layer_label, shown_layers
from loadpeak_exporter.records import RunRecord

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


class RunCollector(Collector):
    """Yields every family of the catalogue for the runs it is given."""

    def __init__(self, runs: Callable[[], Iterable[RunRecord]], layers: str = "all") -> None:
        """Collect from these runs.

        Args:
            runs: gives the records, anew at each collection.
            layers: the setting ``LOADPEAK_LAYERS``.
        """
        self._runs, self._layers = runs, layers

    def describe(self) -> Iterable[Metric]:
        """Nothing: families come from the records, and a registration does no work."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Fresh families."""
        runs = list(self._runs())
        for metric in CATALOGUE:
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=COMMON_LABELS + metric.labels)
            for run in runs:
                for rank in run.ranks:
                    common = (run.run, run.header.variant, str(rank.rank), gpu_label(rank))
                    if metric.layer_value is None:
                        series = metric.series(run, rank)
                    else:
                        series = [
                            ((layer_label(layer.layer),), metric.layer_value(layer))
                            for layer in shown_layers(rank, self._layers)
                        ]
                    for labels, value in series:
                        if value is not None:
                            family.add_metric(common + labels, value)
            if family.samples:
                yield family


def registry(runs: Callable[[], Iterable[RunRecord]], layers: str = "all") -> CollectorRegistry:
    """A registry of its own with only this collector: vLLM's metrics stay out, and ours out of vLLM's."""
    own = CollectorRegistry()
    own.register(RunCollector(runs, layers))
    return own
