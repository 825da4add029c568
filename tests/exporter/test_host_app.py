"""The host service over HTTP: what it shows, to whom, and how much of it."""

import base64
import contextlib
import json
import platform
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from loadpeak.errors import CommandError, SettingError
from loadpeak.record import Exporter
from loadpeak_exporter import alerts, api, serve_settings
from loadpeak_exporter.host import Host
from loadpeak_exporter.host_app import create_host_app
from loadpeak_exporter.store import MOST_RANKS, RunStore
from tests.conftest import free_port
from tests.exporter.building import Startup
from tests.exporter.test_metrics import parse
from tests.exporter.test_run_command import LOADPEAK, environ
from tests.fakes import MiB
from tests.profiler.test_sampler import wait_for

ALERT = {
    "version": "4",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "LoadpeakHeadroomLow", "severity": "critical"},
            "annotations": {"summary": "headroom 1 GiB"},
            "startsAt": "2026-12-01T10:00:00Z",
            "fingerprint": "f1",
        }
    ],
}


def client(home: Path, environment: dict[str, str] | None = None, wall: float = 10.0) -> TestClient:
    found = serve_settings.load(environment or {})
    app = create_host_app(RunStore(home, Host(None, None, wall=lambda: wall)), found)
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Startup(tmp_path, "one", variant="baseline", created_at_wall_seconds=1.0).load(3).ready()
    Startup(tmp_path, "two", variant="fix", release="moe-layer", created_at_wall_seconds=2.0).load(3).ready()
    Startup(tmp_path, "dead", created_at_wall_seconds=3.0).load().session.failed(
        RuntimeError("out of memory")
    )
    Startup(tmp_path, "live", created_at_wall_seconds=4.0).load()
    (tmp_path / "runs" / "broken").mkdir()
    return tmp_path


def runs_on_metrics(http: TestClient) -> set[str]:
    return {dict(labels)["run"] for _, labels in parse(http.get("/metrics").content)}


def test_metrics_show_live_finished_and_crashed_runs(home: Path) -> None:
    assert runs_on_metrics(client(home)) == {"one", "two", "dead", "live"}


def test_ended_runs_leave_metrics_after_a_while_and_live_ones_stay(home: Path) -> None:
    http = client(home, {"LOADPEAK_SERVE_KEEP_HOURS": "1"}, wall=3 * 3600.0)
    assert runs_on_metrics(http) == {"live"}
    assert len(http.get("/api/runs").json()["runs"]) == 5, "the page and the API show all"


def test_number_of_runs_and_layers_on_metrics_is_bounded(home: Path) -> None:
    http = client(home, {"LOADPEAK_SERVE_RUNS": "2", "LOADPEAK_SERVE_LAYERS": "1"})
    assert runs_on_metrics(http) == {"live", "dead"}, "live ones first, then the newest"
    layers = {dict(labels).get("layer") for _, labels in parse(http.get("/metrics").content)} - {None}
    assert layers == {"000"}


def test_number_of_ranks_on_metrics_is_bounded(tmp_path: Path) -> None:
    """A damaged or hostile record has far more ranks than an engine."""
    for rank in range(MOST_RANKS + 50):
        Startup(tmp_path, rank=rank, created_at_wall_seconds=1.0).ready().close()
    http = client(tmp_path)
    ranks = {dict(labels)["rank"] for _, labels in parse(http.get("/metrics").content)}
    assert ranks == {str(rank) for rank in range(MOST_RANKS)}
    (run,) = http.get("/api/runs").json()["runs"]
    assert [damage["reason"] for damage in run["damage"]] == [
        f"holds more ranks than any engine has; {MOST_RANKS} of them are read"
    ]


def test_runs_are_listed_in_short_with_damaged_ones(home: Path) -> None:
    listed = client(home).get("/api/runs").json()
    assert listed["total"] == 5
    found = {run["run"]: run for run in listed["runs"]}
    assert found["broken"]["outcome"] == "damaged"
    assert found["dead"]["ranks"][0]["reason"] == "RuntimeError: out of memory"
    assert found["one"]["ranks"][0]["device_used_peak_bytes"] == 690 * MiB
    assert "layers" not in found["one"]["ranks"][0]
    page = client(home).get("/api/runs?limit=1&offset=1").json()["runs"]
    assert len(page) == 1


def test_one_run_is_told_completely(home: Path) -> None:
    run = client(home).get("/api/runs/one").json()
    assert run["header"]["variant"] == "baseline"
    assert len(run["ranks"][0]["layers"]) == 3
    assert client(home).get("/api/runs/latest:fix").json()["header"]["run"] == "two"


def test_timeline_is_thinned_and_keeps_the_highest(home: Path) -> None:
    startup = Startup(home, "long")
    startup.session.start_phase("load_weights")
    for number in range(2000):
        startup.sample(1000 * MiB if number == 777 else number % 7)
    timeline = client(home).get("/api/runs/long/timeline?points=50").json()
    points = timeline["device_used_bytes"]
    assert len(points) <= 50
    assert max(value for _, value in points) == 1000 * MiB
    assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
    assert timeline["phases"] == [
        {"phase": "load_weights", "from_seconds": pytest.approx(0, abs=0.1), "to_seconds": None}
    ]


def test_comparison_has_the_shape_of_the_command(home: Path) -> None:
    result = client(home).get("/api/compare?baseline=one&fix=two").json()
    assert result["peak_reduction_bytes"] == 60 * MiB
    assert result["fix"]["variant"] == "fix"


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/runs/none", 404, "no run 'none'"),
        ("/api/runs/broken", 404, "is damaged"),
        ("/api/runs/one/timeline?rank=7", 404, "its ranks are: 0"),
        ("/api/runs?limit=1000000", 422, "query.limit"),
        ("/api/compare?baseline=one", 422, "query.fix"),
        ("/api/runs/o", 200, ""),
        ("/api/runs/..%2F..%2Fetc", 404, ""),
        ("/page/../host_app.py", 404, ""),
        ("/page/none.js", 404, ""),
    ],
)
def test_errors_have_one_shape_and_say_what_to_do(home: Path, path: str, status: int, words: str) -> None:
    response = client(home).get(path)
    assert response.status_code == status
    if status != 200:
        assert response.json().keys() == {"error"}
        assert words in response.json()["error"]["message"]


def test_ambiguous_beginning_is_a_conflict(home: Path) -> None:
    Startup(home, "two-again").load().ready()
    response = client(home).get("/api/runs/tw")
    assert response.status_code == 409
    assert "2 runs begin with" in response.json()["error"]["message"]


def test_answer_that_would_be_too_large_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LIMIT_BYTES", 100)
    response = client(home).get("/api/runs/one")
    assert response.status_code == 413
    assert "ask for less" in response.json()["error"]["message"]


def test_api_describes_itself(home: Path) -> None:
    paths = client(home).get("/openapi.json").json()["paths"]
    assert {"/metrics", "/healthz", "/sd", "/api/runs", "/api/runs/{run}", "/api/compare"} <= paths.keys()


def test_reading_changes_nothing_in_the_run_store(home: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    http = client(home)
    for path in ("/metrics", "/api/runs", "/api/runs/one", "/sd"):
        http.get(path)
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before


# ── service discovery ─────────────────────────────────────────────────────────────────────────────


def test_exporters_that_answer_are_targets(home: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        for run, at in (("e1", 5.0), ("e2", 6.0)):
            startup = Startup(home, run, created_at_wall_seconds=at)
            startup.journal.append(Exporter(at_seconds=1.0, host="127.0.0.1", port=port))
        gone = Startup(home, "e3", created_at_wall_seconds=7.0)
        gone.journal.append(Exporter(at_seconds=1.0, host="127.0.0.1", port=1))
        assert client(home).get("/sd").json() == [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"host": platform.node(), "run": "e2"}}
        ], "the port was used again by a newer run, and nobody listens on the other"


# ── alerts ────────────────────────────────────────────────────────────────────────────────────────


def test_alerts_that_are_sent_here_are_kept_and_resolved(home: Path) -> None:
    http = client(home)
    assert http.post("/api/alerts", json=ALERT).status_code == 204
    (alert,) = http.get("/api/alerts").json()["alerts"]
    assert (alert["status"], alert["labels"]["severity"]) == ("firing", "critical")
    resolved = json.loads(json.dumps(ALERT).replace("firing", "resolved"))
    http.post("/api/alerts", json=resolved)
    (alert,) = http.get("/api/alerts").json()["alerts"]
    assert alert["status"] == "resolved"


def test_alerts_without_a_fingerprint_are_told_apart_by_their_labels(home: Path) -> None:
    http = client(home)
    for host, status in (("a", "firing"), ("b", "firing"), ("a", "resolved")):
        alert = {"status": status, "labels": {"alertname": "x", "host": host}}
        http.post("/api/alerts", json={"alerts": [alert]})
    kept = http.get("/api/alerts").json()["alerts"]
    assert [(alert["labels"]["host"], alert["status"]) for alert in kept] == [
        ("a", "resolved"),
        ("b", "firing"),
    ]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{}", 400), (b"\x00", 400), (b"x" * (alerts.LIMIT_BYTES + 1), 413)]
)
def test_what_is_no_notification_is_refused(home: Path, body: bytes, status: int) -> None:
    response = client(home).post("/api/alerts", content=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_number_of_kept_alerts_is_bounded(home: Path) -> None:
    http = client(home)
    many = [{**ALERT["alerts"][0], "fingerprint": str(number)} for number in range(250)]  # type: ignore[dict-item]
    http.post("/api/alerts", json={"alerts": many})
    assert len(http.get("/api/alerts").json()["alerts"]) == alerts.MOST_ALERTS


# ── access ────────────────────────────────────────────────────────────────────────────────────────

BASIC = {"LOADPEAK_SERVE_USER": "operator", "LOADPEAK_SERVE_PASSWORD": "pässword"}


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("environment", "header", "status"),
    [
        ({"LOADPEAK_SERVE_TOKEN": "t"}, None, 401),
        ({"LOADPEAK_SERVE_TOKEN": "t"}, "Bearer wrong", 401),
        ({"LOADPEAK_SERVE_TOKEN": "t"}, "Bearer t", 200),
        ({"LOADPEAK_SERVE_TOKEN": "t"}, "bearer t", 200),
        (BASIC, basic("operator:pässword"), 200),
        (BASIC, basic("operator:wrong"), 401),
        (BASIC, "Basic ???", 401),
        ({**BASIC, "LOADPEAK_SERVE_TOKEN": "t"}, "Bearer t", 200),
    ],
)
def test_token_or_password_is_asked_for(
    home: Path, environment: dict[str, str], header: str | None, status: int
) -> None:
    http = client(home, environment)
    for path in ("/metrics", "/api/runs", "/", "/page/main.js", "/openapi.json", "/sd"):
        response = http.get(path, headers={"Authorization": header} if header else {})
        assert response.status_code == status, path
    if status == 401:
        assert response.headers["WWW-Authenticate"]
        assert response.json()["error"]["code"] == "unauthorized"
    assert http.get("/healthz").status_code == 200


def test_secret_can_be_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    assert serve_settings.load({"LOADPEAK_SERVE_TOKEN": f"@{tmp_path}/token"}).token == "s3cret"
    with pytest.raises(SettingError, match="LOADPEAK_SERVE_TOKEN"):
        serve_settings.load({"LOADPEAK_SERVE_TOKEN": "@/nowhere"})


@pytest.mark.parametrize("name", ["LOADPEAK_SERVE_USER", "LOADPEAK_SERVE_PASSWORD"])
def test_half_of_a_login_is_refused(name: str) -> None:
    with pytest.raises(CommandError, match="needs both"):
        serve_settings.load({name: "x"})


def test_certificate_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.pem").touch()
    with pytest.raises(CommandError, match="TLS needs both"):
        serve_settings.load({"LOADPEAK_SERVE_CERTIFICATE": str(tmp_path / "c.pem")})


# ── the command ───────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def serving(home: Path, **extra: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    port = free_port()
    with subprocess.Popen(
        [*LOADPEAK, "serve", "--port", str(port)],
        env={**environ(home), **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, port
        finally:
            process.terminate()


def fetch(url: str, context: ssl.SSLContext | None = None) -> str:
    with urllib.request.urlopen(url, timeout=5, context=context) as response:
        text: str = response.read().decode()
        return text


def reached(url: str, context: ssl.SSLContext | None = None) -> bool:
    try:
        return bool(fetch(url, context))
    except OSError:
        return False


def test_command_serves_and_ends_on_a_signal(home: Path) -> None:
    with serving(home) as (process, port):
        wait_for(lambda: reached(f"http://127.0.0.1:{port}/healthz"))
        assert 'run="live"' in fetch(f"http://127.0.0.1:{port}/metrics")
        process.terminate()
        output, errors = process.communicate(timeout=10)
    assert f"http://127.0.0.1:{port}/" in output
    assert "Traceback" not in errors


def test_command_speaks_tls(home: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(make, check=True, capture_output=True)
    environment = {"LOADPEAK_SERVE_CERTIFICATE": str(certificate), "LOADPEAK_SERVE_KEY": str(key)}
    with serving(home, **environment) as (_, port):
        context = ssl.create_default_context(cafile=str(certificate))
        wait_for(lambda: reached(f"https://127.0.0.1:{port}/healthz", context))
        assert "loadpeak_layers_done" in fetch(f"https://127.0.0.1:{port}/metrics", context)


def test_port_in_use_is_one_clear_line(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*LOADPEAK, "serve", "--port", str(port)],
            env=environ(home),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"LOADPEAK_SERVE_CERTIFICATE": "/etc/passwd", "LOADPEAK_SERVE_KEY": "/etc/passwd"},
            "the certificate /etc/passwd and the key /etc/passwd cannot be used",
        ),
        ({"LOADPEAK_HOME": "/etc/passwd"}, "LOADPEAK_HOME=/etc/passwd is no folder"),
        ({"LOADPEAK_SERVE_HOST": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_service_that_cannot_start_is_one_clear_line(
    home: Path, settings: dict[str, str], message: str
) -> None:
    with serving(home, **settings) as (process, _):
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert message in errors
    assert (output, errors.count("\n")) == ("", 1)


def test_service_ends_although_a_client_says_nothing(home: Path) -> None:
    with serving(home) as (process, port):
        wait_for(lambda: reached(f"http://127.0.0.1:{port}/healthz"))
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /api/alerts HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
            time.sleep(0.2)
            process.terminate()
            process.wait(10)


def test_client_that_breaks_off_is_no_error_of_the_service(home: Path) -> None:
    with serving(home) as (process, port):
        wait_for(lambda: reached(f"http://127.0.0.1:{port}/healthz"))
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /api/alerts HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert reached(f"http://127.0.0.1:{port}/healthz")
        process.terminate()
        assert process.communicate(timeout=10)[1] == ""


def test_run_store_that_does_not_exist_yet_is_served_empty(tmp_path: Path) -> None:
    http = client(tmp_path / "none")
    assert http.get("/metrics").text == ""
    assert http.get("/api/runs").json() == {"runs": [], "total": 0}
