"""Alerts that Alertmanager sends here, kept in memory for the built-in page."""

from __future__ import annotations

import http
import time
from collections import deque
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from loadpeak_exporter.app import errors

MOST_ALERTS = 100
LIMIT_BYTES = 1 << 20


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert of a notification, as Alertmanager's webhook has it (version 4)."""

    status: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    starts_at: str = msgspec.field(name="startsAt", default="")
    ends_at: str = msgspec.field(name="endsAt", default="")
    fingerprint: str = ""


class _Notification(msgspec.Struct, frozen=True):
    alerts: list[Alert]


_decoder = msgspec.json.Decoder(_Notification)
_ALERT_SCHEMA = msgspec.json.schema_components([Alert])[1]["Alert"]
_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["alerts"],
                "properties": {"alerts": {"type": "array", "items": _ALERT_SCHEMA}},
            }
        }
    },
}


def create_router() -> APIRouter:
    """Routes with their own store of the last alerts."""
    router = APIRouter(prefix="/api", responses=errors(401))
    kept: deque[dict[str, Any]] = deque(maxlen=MOST_ALERTS)

    @router.post(
        "/alerts",
        status_code=http.HTTPStatus.NO_CONTENT,
        responses=errors(400, 413),
        openapi_extra={"requestBody": _BODY},
    )
    async def receive(request: Request) -> Response:
        """Alertmanager's webhook."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LIMIT_BYTES:
                raise HTTPException(
                    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"a notification has at most {LIMIT_BYTES} bytes",
                )
        try:
            notification = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise HTTPException(
                http.HTTPStatus.BAD_REQUEST, f"not a notification of Alertmanager: {error}"
            ) from error
        for alert in notification.alerts:
            # Alertmanager's fingerprint stands for the labels; others may send none.
            name = alert.fingerprint or alert.labels
            for old in [old for old in kept if (old["fingerprint"] or old["labels"]) == name]:
                kept.remove(old)
            kept.appendleft({"received_at_wall_seconds": time.time(), **msgspec.to_builtins(alert)})
        return Response(status_code=http.HTTPStatus.NO_CONTENT)

    @router.get("/alerts")
    async def alerts() -> dict[str, list[dict[str, Any]]]:
        """The last alerts that were sent here, newest first; one that was resolved says so."""
        return {"alerts": list(kept)}

    return router
