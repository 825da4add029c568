"""The text of ``/metrics``, fast: inside an engine a scrape holds the interpreter lock of a worker.

prometheus_client needs about 35 ms for the text of 8 ranks with 96 layers, and this needs a few
(benchmarks/scrape.py); a test holds both to the same samples. What a finished layer or run has to say is
written once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from loadpeak_exporter.catalogue import CATALOGUE, COMMON_LABELS, gpu_label, layer_label, shown_layers
from loadpeak_exporter.records import LayerRecord, RunRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAYER_METRICS = tuple(metric for metric in CATALOGUE if metric.layer_value is not None)
_HEADERS = {
    metric.name: f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n".encode()
    for metric in CATALOGUE
}


class _Layer(NamedTuple):
    record: LayerRecord
    common: str
    lines: tuple[str, ...]
    """For each of the layer metrics."""


class _Run(NamedTuple):
    record: RunRecord
    parts: dict[str, bytes]
    """Lines by the name of their metric."""
    layers: dict[tuple[int, int], _Layer]
    """By rank and layer."""


class Exposition:
    """Renders records; the text is kept as long as the records are the same objects."""

    def __init__(self, layers: str = "all", most_layers: int | None = None) -> None:
        """Show these layers.

        Args:
            layers: the setting ``LOADPEAK_LAYERS``.
            most_layers: how many layers of a rank at the most.
        """
        self._layers, self._most_layers = layers, most_layers
        self._runs: tuple[_Run, ...] = ()
        self._text = b""

    def render(self, runs: Iterable[RunRecord]) -> bytes:
        """The text exposition format 0.0.4."""
        before = {run.record.run: run for run in self._runs}
        rendered = tuple(self._run(record, before.get(record.run)) for record in runs)
        if len(rendered) != len(self._runs) or any(
            new is not old for new, old in zip(rendered, self._runs, strict=True)
        ):
            self._text = _join(rendered)
            self._runs = rendered
        return self._text

    def _run(self, run: RunRecord, before: _Run | None) -> _Run:
        """One run's lines; those it had before, if nothing has changed."""
        if before is not None and before.record is run:
            return before
        parts: dict[str, list[str]] = {metric.name: [] for metric in CATALOGUE}
        layers: dict[tuple[int, int], _Layer] = {}
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
            for record in shown_layers(rank, self._layers, self._most_layers):
                key = (rank.rank, record.layer)
                layer = before.layers.get(key) if before else None
                if layer is None or layer.record is not record or layer.common != common:
                    layer = _Layer(record, common, _layer_lines(record, common))
                layers[key] = layer
                for metric, text in zip(_LAYER_METRICS, layer.lines, strict=True):
                    parts[metric.name].append(text)
        return _Run(run, {name: "".join(lines).encode() for name, lines in parts.items()}, layers)


def _join(runs: tuple[_Run, ...]) -> bytes:
    """All lines of a metric together, under its header; a metric without any is left out."""
    text: list[bytes] = []
    for metric in CATALOGUE:
        parts = [part for run in runs if (part := run.parts[metric.name])]
        if parts:
            text += [_HEADERS[metric.name], *parts]
    return b"".join(text)


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
