"""Template variables: data source, then model, host and run, each narrowed by those before it."""

from loadpeak_dashboards.grafana import Variable
from loadpeak_dashboards.queries import metric

_INFO = "run_info"
NEWEST_FIRST = 2
"""Grafana's number for descending alphabetical order: run ids begin with their time."""


def _values(label: str, **labels: str) -> str:
    return f"label_values({metric(_INFO, **labels)}, {label})"


DATA_SOURCE = Variable(name="datasource", label="Data source", query="prometheus", of="datasource")
MODEL = Variable(
    name="model", label="Model", query=_values("model"), sort=1, includeAll=True, multi=True, default="All"
)
HOST = Variable(
    name="host",
    label="Host",
    query=_values("host", model__re="$model"),
    sort=1,
    includeAll=True,
    multi=True,
    default="All",
)


def run(name: str, label: str) -> Variable:
    """One run of the chosen models and hosts, the newest first."""
    query = _values("run", model__re="$model", host__re="$host")
    return Variable(name=name, label=label, query=query, sort=NEWEST_FIRST)
