"""The app of the host service: the engine's app over the whole run store, the API and the page."""

from __future__ import annotations

import http
import importlib.resources
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from loadpeak_exporter import alerts, api, discovery
from loadpeak_exporter.access import Access
from loadpeak_exporter.app import create_app
from loadpeak_exporter.serve_settings import ServeSettings
from loadpeak_exporter.store import RunStore

PAGE = Path(__file__).parent / "page"


def create_host_app(store: RunStore, settings: ServeSettings, layers: str = "all") -> FastAPI:
    """The app of ``loadpeak serve``.

    Args:
        store: the run store.
        settings: those of the host service.
        layers: the setting ``LOADPEAK_LAYERS``.
    """
    app = create_app(
        lambda: store.exported(settings.keep_hours * 3600, settings.runs), layers, settings.layers
    )
    app.include_router(api.create_router(store))
    app.include_router(alerts.create_router())
    app.include_router(discovery.create_router(store))

    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/page/plotly.min.js", include_in_schema=False)
    def plotly() -> FileResponse:
        return FileResponse(_plotly(), headers={"Cache-Control": "max-age=86400"})

    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    app.add_middleware(Access, settings=settings)
    return app


def _plotly() -> str:
    """The charting library out of its Python package."""
    try:
        script = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    except ModuleNotFoundError:
        raise HTTPException(
            http.HTTPStatus.NOT_FOUND, "the package plotly is not installed: pip install plotly"
        ) from None
    return str(script)
