"""The text of ``/metrics``, fast: inside an engine a scrape holds the interpreter lock of a worker.

prometheus_client needs about 35 ms for the text of 8 ranks with 96 layers, and this needs a few
(benchmarks/scrape.py); a test holds both to the same samples. Lines of a finished layer are written once.
"""

from __future__ import annotations

from collections.abc import Iterable

from loadpeak_exporter.catalogue import CATALOGUE, COMMON_LABELS, gpu_label, layer_label, shown_layers
from loadpeak_exporter.records import LayerRecord, RunRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAYER_METRICS = tuple(metric for metric in CATALOGUE if metric.layer_value is not None)
_HEADERS = {
    metric.name: f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    for metric in CATALOGUE
}


class Exposition:
    """Renders records; the text is kept as long as the records are the same objects."""

    def __init__(self, layers: str = "all", most_layers: int | None = None) -> None:
        """Show these layers.

        Args:
            layers: the setting ``LOADPEAK_LAYERS``.
            most_layers: how many layers of a rank at the most.
        """
        self._layers, self._most_layers = layers, most_layers
        self._shown: list[RunRecord] = []
        self._text = b""
        self._lines: dict[tuple[str, int, int], tuple[LayerRecord, str, tuple[str, ...]]] = {}

    def render(self, runs: Iterable[RunRecord]) -> bytes:
        """The text exposition format 0.0.4."""
        runs = list(runs)
        if len(runs) != len(self._shown) or any(a is not b for a, b in zip(runs, self._shown, strict=True)):
            self._text = self._render(runs)
            self._shown = runs
        return self._text

    def _render(self, runs: list[RunRecord]) -> bytes:
        parts: dict[str, list[str]] = {metric.name: [] for metric in CATALOGUE}
        kept: dict[tuple[str, int, int], tuple[LayerRecord, str, tuple[str, ...]]] = {}
        for run in runs:
            for rank in run.ranks:
                values = (run.run, run.header.variant, str(rank.rank), gpu_label(rank))
                common = _labels(COMMON_LABELS, values)
                for metric in CATALOGUE:
                    if metric.layer_value is None:
                        lines = parts[metric.name]
                        for labels, value in metric.series(run, rank):
                            if value is not None:
                                own = "," + _labels(metric.labels, labels) if labels else ""
                                lines.append(f"{metric.name}{{{common}{own}}} {value}\n")
                for layer in shown_layers(rank, self._layers, self._most_layers):
                    key = (run.run, rank.rank, layer.layer)
                    entry = self._lines.get(key)
                    if entry is None or entry[0] is not layer or entry[1] != common:
                        entry = (layer, common, _layer_lines(layer, common))
                    kept[key] = entry
                    for metric, text in zip(_LAYER_METRICS, entry[2], strict=True):
                        parts[metric.name].append(text)
        self._lines = kept
        return "".join(
            _HEADERS[name] + "".join(lines) for name, lines in parts.items() if any(lines)
        ).encode()


def _layer_lines(layer: LayerRecord, common: str) -> tuple[str, ...]:
    label = f'{{{common},layer="{layer_label(layer.layer)}"}}'
    values = [metric.layer_value(layer) for metric in _LAYER_METRICS if metric.layer_value]
    return tuple(
        "" if value is None else f"{metric.name}{label} {value}\n"
        for metric, value in zip(_LAYER_METRICS, values, strict=True)
    )


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
