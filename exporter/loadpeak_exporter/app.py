"""The HTTP app: the same inside an engine, for its one run, and alone on a host, for all.

Handlers only translate. Every error has one shape: ``{"error": {"code": ..., "message": ...}}``.
"""

from __future__ import annotations

import http
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from loadpeak import __version__
from loadpeak.errors import AmbiguousRunError, LoadpeakError, RunNotFoundError
from loadpeak_exporter.exposition import CONTENT_TYPE, Exposition
from loadpeak_exporter.records import RunRecord


def create_app(
    runs: Callable[[], Iterable[RunRecord]], layers: str = "all", most_layers: int | None = None
) -> FastAPI:
    """The app over these runs.

    Args:
        runs: gives the records, anew at each request; the same objects as long as nothing has changed.
        layers: the setting ``LOADPEAK_LAYERS``.
        most_layers: how many layers of a rank have series of their own at the most.
    """
    app = FastAPI(title="loadpeak", version=__version__, docs_url=None, redoc_url=None)
    exposition = Exposition(layers, most_layers)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Every run in the Prometheus text format."""
        return Response(exposition.render(runs()), media_type=CONTENT_TYPE)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the exporter itself is well."""
        return {"status": "ok", "version": __version__}

    app.exception_handler(LoadpeakError)(_our_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid_request)
    app.exception_handler(ClientDisconnect)(_gone)
    app.exception_handler(Exception)(_unexpected)
    return app


_STATUS: dict[type[Exception], int] = {
    RunNotFoundError: http.HTTPStatus.NOT_FOUND,
    AmbiguousRunError: http.HTTPStatus.CONFLICT,
}


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The one shape of an error."""
    code = http.HTTPStatus(status).phrase.lower().replace(" ", "_")
    return JSONResponse(
        {"error": {"code": code, "message": message}}, status_code=status, headers=dict(headers or {})
    )


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route: it may answer with these, each in the one shape of an error."""
    shape = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message"],
                "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            }
        },
    }
    content = {"application/json": {"schema": shape}}
    return {
        status: {"description": http.HTTPStatus(status).phrase, "content": content} for status in statuses
    }


async def _our_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(_STATUS.get(type(error), http.HTTPStatus.BAD_REQUEST), str(error))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == http.HTTPStatus.NOT_FOUND and message == "Not Found":
        message = f"there is no {request.url.path} here; /openapi.json tells what there is"
    return error_response(error.status_code, message, dict(error.headers or {}))


async def _invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return error_response(http.HTTPStatus.UNPROCESSABLE_ENTITY, f"{place}: {first['msg']}")


async def _gone(request: Request, error: Exception) -> JSONResponse:
    """For nobody: without an answer the server would log a traceback."""
    return error_response(http.HTTPStatus.BAD_REQUEST, "the request ended before its body did")


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    return error_response(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
