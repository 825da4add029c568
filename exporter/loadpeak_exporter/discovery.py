"""HTTP service discovery for Prometheus: the exporters inside this host's engines."""

from __future__ import annotations

import platform
from typing import Any

from fastapi import APIRouter

from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore

EVERYWHERE = ("0.0.0.0", "::", "")


def create_router(store: RunStore) -> APIRouter:
    """The route ``/sd``."""
    router = APIRouter()

    @router.get("/sd")
    def sd() -> list[dict[str, Any]]:
        """Targets in the form of Prometheus's `http_sd_config`; the label `host` names this host."""
        return [
            {"targets": [target], "labels": {"host": platform.node(), "run": run.run}}
            for run, target in _exporters(store)
        ]

    return router


def _exporters(store: RunStore) -> list[tuple[RunRecord, str]]:
    found = []
    for run in store.runs():
        if isinstance(run, RunRecord) and run.outcome in ("loading", "ready"):
            for rank in run.ranks:
                if rank.exporter is not None and store.reader(run.run).alive(rank.rank):
                    host, _, port = rank.exporter.rpartition(":")
                    found.append((run, f"{platform.node() if host in EVERYWHERE else host}:{port}"))
    return found
