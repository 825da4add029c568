"""The JSON API of the host service: read-only, over the run store. Handlers only translate."""

from __future__ import annotations

import http
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Response
from starlette.exceptions import HTTPException

from loadpeak_exporter.app import errors
from loadpeak_exporter.compare import compare
from loadpeak_exporter.records import DamagedRun, RankRecord, RunRecord
from loadpeak_exporter.store import RunStore, last_word

LIMIT_BYTES = 8 << 20
"""No answer is larger."""
MOST_RUNS = 200
MOST_POINTS = 5000

Name = Annotated[str, Path(min_length=1)]

_encoder = msgspec.json.Encoder()


def create_router(store: RunStore) -> APIRouter:
    """Routes over a run store."""
    router = APIRouter(prefix="/api", responses=errors(401, 404, 409, 413, 422))

    @router.get("/runs")
    def runs(
        limit: Annotated[int, Query(ge=1, le=MOST_RUNS)] = 50, offset: Annotated[int, Query(ge=0)] = 0
    ) -> Response:
        """Runs, newest first, in short; damaged ones with what is wrong with them."""
        page = [summary(run) for run in store.runs(limit, offset)]
        return _json({"runs": page, "total": len(store)})

    @router.get("/runs/{run}")
    def run(run: Name) -> Response:
        """Everything that is known of a run: its id, a beginning of it, `latest` or `latest:VARIANT`."""
        return _json(store.find(run))

    @router.get("/runs/{run}/timeline")
    def timeline(
        run: Name,
        rank: Annotated[int, Query(ge=0)] = 0,
        points: Annotated[int, Query(ge=10, le=MOST_POINTS)] = 600,
    ) -> Response:
        """What a rank's memory did over time; each point is the highest of its interval."""
        record = store.find(run)
        found = store.reader(record.run).timeline(rank, points)
        if found is None:
            ranks = ", ".join(str(rank.rank) for rank in record.ranks) or "none"
            raise HTTPException(
                http.HTTPStatus.NOT_FOUND, f"run {record.run} has no rank {rank}; its ranks are: {ranks}"
            )
        return _json(found)

    @router.get("/compare")
    def comparison(
        baseline: Annotated[str, Query(min_length=1)], fix: Annotated[str, Query(min_length=1)]
    ) -> Response:
        """Two runs side by side, in the shape of `loadpeak compare --json`."""
        return _json(compare(store.find(baseline), store.find(fix)))

    return router


def summary(run: RunRecord | DamagedRun) -> dict[str, Any]:
    """A run in short."""
    if isinstance(run, DamagedRun):
        return {"run": run.run, "outcome": "damaged", "damage": run.damage}
    return {
        "run": run.run,
        "outcome": run.outcome,
        "variant": run.header.variant,
        "experiment": run.header.experiment,
        "model": run.header.model,
        "quantization": run.header.quantization,
        "hostname": run.header.hostname,
        "created_at_wall_seconds": run.header.created_at_wall_seconds,
        "updated_at_wall_seconds": last_word(run),
        "ranks": [_rank_summary(rank) for rank in run.ranks],
        "damage": run.damage,
    }


def _rank_summary(rank: RankRecord) -> dict[str, Any]:
    names = (
        "rank",
        "outcome",
        "phase",
        "layers_done",
        "layers_expected",
        "device_used_bytes",
        "device_used_peak_bytes",
        "headroom_bytes",
        "load_peak_bytes",
        "load_headroom_bytes",
        "reserved_peak_bytes",
        "allocated_peak_bytes",
    )
    device = rank.device
    return {
        **{name: getattr(rank, name) for name in names},
        "device": None if device is None else device.name,
        "device_total_bytes": None if device is None else device.total_bytes,
        "reason": None if rank.failure is None else rank.failure.reason,
    }


def _json(value: Any) -> Response:
    data = _encoder.encode(value)
    if len(data) > LIMIT_BYTES:
        raise HTTPException(
            http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the answer would have {len(data)} bytes, at most {LIMIT_BYTES} are sent; ask for less",
        )
    return Response(data, media_type="application/json")
