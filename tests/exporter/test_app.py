"""The app over HTTP, and the server that carries it."""

import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient

from loadpeak import settings
from loadpeak.guard import Guard
from loadpeak.record import Exporter
from loadpeak.recording import Recording
from loadpeak_exporter import in_process
from loadpeak_exporter.app import create_app
from loadpeak_exporter.server import Server, bind
from loadpeak_exporter.store import RunStore
from tests.exporter.building import Startup
from tests.fakes import Lines
from tests.profiler.test_sampler import wait_for


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    Startup(tmp_path).load().ready()
    store = RunStore(tmp_path)
    app = create_app(lambda: store.exported(math.inf, 10))

    @app.get("/explode")
    def explode() -> None:
        raise RuntimeError("broken")

    @app.get("/number/{value}")
    def number(value: int) -> int:
        return value

    return TestClient(app, raise_server_exceptions=False)


def test_metrics_are_served_as_prometheus_text(client: TestClient) -> None:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "loadpeak_layers_done{" in response.text


def test_health_is_told(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/explode", 500, "internal_server_error"),
    ],
)
def test_every_error_has_the_one_shape(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"]


def test_invalid_request_names_the_place(client: TestClient) -> None:
    response = client.get("/number/x")
    assert response.status_code == 422
    assert "path.value" in response.json()["error"]["message"]


def test_port_in_use_gives_the_next_one() -> None:
    with bind("127.0.0.1", 19838) as first, bind("127.0.0.1", 19838) as second:
        assert first.getsockname()[1] >= 19838
        assert second.getsockname()[1] > first.getsockname()[1]


def test_address_that_is_not_ours_is_refused_at_once() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        bind("192.0.2.1", 19838)


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        text: str = response.read().decode()
        return text


def test_server_runs_in_a_thread_and_stops(tmp_path: Path) -> None:
    server = Server(create_app(lambda: []), bind("127.0.0.1", 19838))
    server.start()
    wait_for(lambda: json.loads(get(server.port, "/healthz")))
    server.stop()
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        get(server.port)


# ── inside an engine ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "loadpeak-exporter")


def recording(folder: Path | None, lines: Lines, first_on_host: bool = True, **environ: str) -> Any:
    return cast(
        "Recording",
        SimpleNamespace(
            folder=folder,
            settings=settings.load({"LOADPEAK_PORT": "19838", **environ}),
            worker=SimpleNamespace(first_on_host=first_on_host),
            guard=Guard(),
            write=lines.append,
        ),
    )


@pytest.mark.usefixtures("threads")
def test_run_of_the_engine_is_visible_while_it_loads_and_after(tmp_path: Path) -> None:
    startup, lines = Startup(tmp_path), Lines()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 19838))
        taken.listen()
        in_process.attach(recording(startup.folder, lines))
        wait_for(lambda: lines.of(Exporter))
    line = lines.one(Exporter)
    assert (line.host, line.port > 19838) == ("127.0.0.1", True)
    assert 'outcome="loading"} 1' in get(line.port)
    startup.load()
    assert 'loadpeak_layers_done{run="source",variant="baseline",rank="0",gpu="GPU-a"} 2' in get(line.port)
    startup.ready()
    assert 'outcome="ready"} 1' in get(line.port)


@pytest.mark.parametrize(
    ("folder", "first", "environ"),
    [(None, True, {}), (Path("/x"), False, {}), (Path("/x"), True, {"LOADPEAK_PORT": "off"})],
    ids=["nothing is recorded", "another rank serves", "switched off"],
)
def test_no_exporter_where_none_is_wanted(folder: Path | None, first: bool, environ: dict[str, str]) -> None:
    before = threading.active_count()
    lines = Lines()
    in_process.attach(recording(folder, lines, first, **environ))
    assert threading.active_count() == before
    assert lines == []


def test_exporter_that_cannot_listen_is_a_counted_hook_error(tmp_path: Path) -> None:
    fake = recording(Startup(tmp_path).folder, Lines(), LOADPEAK_HOST="192.0.2.1")
    in_process.attach(fake)
    wait_for(lambda: fake.guard.errors)
