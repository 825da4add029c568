"""Manifests for the Prometheus operator: scrape the engines, load the rules, give Grafana its dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LABELS = {"app.kubernetes.io/name": "loadpeak"}
PORT_NAME = "loadpeak"
"""Name of the engine's container port for LOADPEAK_PORT, which has to listen on the pod's address."""


def manifests(rules: Mapping[str, Any], dashboards: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Every manifest by its file name."""
    found = {
        "podmonitor.yaml": _pod_monitor(),
        "prometheusrule.yaml": _object(
            "monitoring.coreos.com/v1", "PrometheusRule", "loadpeak", {"spec": dict(rules)}
        ),
    }
    for name, text in dashboards.items():
        stem = name.removesuffix(".json")
        config = _object("v1", "ConfigMap", f"loadpeak-{stem}", {"data": {name: text}})
        config["metadata"]["labels"] = {**LABELS, "grafana_dashboard": "1"}
        found[f"dashboard-{stem}.yaml"] = config
    return found


def _pod_monitor() -> dict[str, Any]:
    """Scrapes the exporter inside each engine's pod; the node is the host."""
    endpoint = {
        "port": PORT_NAME,
        "path": "/metrics",
        "interval": "1s",
        "scrapeTimeout": "1s",
        "relabelings": [
            {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "host"},
            {"targetLabel": "job", "replacement": "loadpeak-engines"},
        ],
    }
    spec = {
        "selector": {"matchLabels": {"loadpeak": "enabled"}},
        "namespaceSelector": {"any": True},
        "podMetricsEndpoints": [endpoint],
    }
    return _object("monitoring.coreos.com/v1", "PodMonitor", "loadpeak-engines", {"spec": spec})


def _object(version: str, kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(LABELS)}, **body}
