"""grafanalib, extended by what it lacks: today's panel types and options, and no keys of old Grafanas.

grafanalib's own panel classes write options of Grafana 7 and earlier beside the current ones, and have none
for trend panels. One class stands for every panel type here; what it writes validates against Grafana's
published schemas (tests/dashboards).
"""

from __future__ import annotations

import json
from typing import Any

import attr
from grafanalib import core
from grafanalib._gen import DashboardEncoder

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 41
PANEL_KEYS = (
    "id",
    "type",
    "title",
    "description",
    "gridPos",
    "datasource",
    "targets",
    "fieldConfig",
    "options",
    "transformations",
    "links",
    "pluginVersion",
)
PLUGIN_VERSION = "12.1.0"
_fields: Any = attr.s  # grafanalib is not typed, so the fields that classes inherit are not known


@_fields(auto_attribs=True, kw_only=True)
class Panel(core.Panel):  # type: ignore[misc]
    """A panel of any type, with the keys that today's Grafana has and no others.

    Args:
        kind: the panel type, for example ``trend``.
        unit: Grafana's name of the unit.
        custom: ``fieldConfig.defaults.custom``.
        options: the panel's options.
        overrides: ``fieldConfig.overrides``.
        defaults: more of ``fieldConfig.defaults``.
    """

    kind: str = "timeseries"
    unit: str = "bytes"
    custom: dict[str, Any] = attr.Factory(dict)
    options: dict[str, Any] = attr.Factory(dict)
    overrides: list[dict[str, Any]] = attr.Factory(list)
    defaults: dict[str, Any] = attr.Factory(dict)

    def to_json_data(self) -> dict[str, Any]:
        """The panel's JSON."""
        defaults = {
            "unit": self.unit,
            "color": {"mode": "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
            "mappings": [],
            **({"custom": self.custom} if self.custom else {}),
            **self.defaults,
        }
        whole = self.panel_json(
            {
                "type": self.kind,
                "pluginVersion": PLUGIN_VERSION,
                "options": self.options,
                "targets": list(self.targets),
            }
        )
        whole["datasource"] = DATA_SOURCE
        whole["fieldConfig"] = {"defaults": defaults, "overrides": self.overrides}
        return {key: whole[key] for key in PANEL_KEYS if whole.get(key) not in (None, [])}


@_fields(auto_attribs=True, kw_only=True)
class Target(core.Target):  # type: ignore[misc]
    """A query, with the keys of the Prometheus data source and no others."""

    def to_json_data(self) -> dict[str, Any]:
        """The query's JSON."""
        return {
            "datasource": DATA_SOURCE,
            "refId": self.refId,
            "expr": self.expr,
            "legendFormat": self.legendFormat,
            "format": self.format,
            "instant": self.instant,
            "range": not self.instant,
            "editorMode": "code",
        }


@_fields(auto_attribs=True, kw_only=True)
class Variable(core.Template):  # type: ignore[misc]
    """A template variable with today's keys; ``of`` says whether it is a query or a data source."""

    of: str = "query"

    def to_json_data(self) -> dict[str, Any]:
        """The variable's JSON."""
        common = {"name": self.name, "label": self.label, "type": self.of, "hide": 0, "skipUrlSync": False}
        if self.of == "datasource":
            return {
                **common,
                "query": "prometheus",
                "regex": "",
                "refresh": 1,
                "multi": False,
                "includeAll": False,
            }
        return {
            **common,
            "datasource": DATA_SOURCE,
            "query": self.query,
            "regex": "",
            "refresh": 2,
            "sort": self.sort,
            "multi": self.multi,
            "includeAll": self.includeAll,
            **({"allValue": ".*"} if self.includeAll else {}),
        }


def dashboard_json(dashboard: core.Dashboard) -> str:
    """A dashboard as it is committed: stable key order, current keys only."""
    whole = json.loads(json.dumps(dashboard.to_json_data(), cls=DashboardEncoder))
    kept = {
        key: whole[key]
        for key in (
            "uid",
            "title",
            "description",
            "tags",
            "editable",
            "graphTooltip",
            "links",
            "panels",
            "refresh",
            "schemaVersion",
            "templating",
            "time",
            "timezone",
        )
    }
    kept["annotations"] = {"list": []}
    kept["timepicker"] = {}
    kept["fiscalYearStartMonth"] = 0
    return json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
