"""HTTP service discovery for Prometheus: the exporters inside this host's engines."""

from __future__ import annotations

import platform
import socket
from typing import Any

from fastapi import APIRouter

from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore

CONNECT_SECONDS = 0.2
NEWEST = 200
"""Runs in which exporters are looked for."""
EVERYWHERE = ("0.0.0.0", "::", "")


def create_router(store: RunStore) -> APIRouter:
    """The route ``/sd``."""
    router = APIRouter()

    @router.get("/sd")
    def sd() -> list[dict[str, Any]]:
        """Targets in the form of Prometheus's `http_sd_config`; the label `host` names this host."""
        return [
            {"targets": [target], "labels": {"host": platform.node(), "run": run}}
            for target, run in _exporters(store).items()
            if _answers(target)
        ]

    return router


def _exporters(store: RunStore) -> dict[str, str]:
    """Where exporters listen, and their run; a port that was used again is the newest run's."""
    found: dict[str, str] = {}
    for run in store.runs(NEWEST):
        if isinstance(run, RunRecord) and run.outcome in ("loading", "ready"):
            for rank in run.ranks:
                if rank.exporter is not None:
                    host, _, port = rank.exporter.rpartition(":")
                    target = f"{platform.node() if host in EVERYWHERE else host}:{port}"
                    found.setdefault(target, run.run)
    return found


def _answers(target: str) -> bool:
    """Whether somebody listens there: an engine may have ended since, without a word in its record."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError):
        # ValueError: no name of a host, or no number of a port.
        return False
    return True
