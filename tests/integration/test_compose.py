"""docker compose, run by a real Docker engine with stand-ins for the images that cannot be pulled."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadpeak import __version__
from tests.conftest import ROOT, free_port
from tests.profiler.test_sampler import wait_for

STAND_INS = Path(__file__).parent / "stand_ins"
PACKAGES = "python3-minimal,libpython3-stdlib,prometheus,prometheus-alertmanager"
PASSWORD = {"GRAFANA_PASSWORD": "only for this test"}
PORTS = {
    name: free_port()
    for name in ("LOADPEAK_SERVE_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT", "GRAFANA_PORT")
}


@pytest.fixture(scope="module")
def compose_command(need: Callable[[bool, str], None]) -> str:
    command = shutil.which("docker-compose")
    need(command is not None, "docker-compose is not installed")
    return str(command)


def compose(command: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, "--project-directory", str(ROOT), "-f", str(ROOT / "docker-compose.yml"), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_file_is_accepted_and_asks_for_a_password(compose_command: str) -> None:
    assert compose(compose_command, "--profile", "demo", "config", env=PASSWORD).returncode == 0
    refused = compose(compose_command, "config", env={"GRAFANA_PASSWORD": ""})
    assert refused.returncode != 0
    assert "set GRAFANA_PASSWORD to a password of your own" in refused.stderr


def test_versions_are_pinned_and_ours_is_the_current_one() -> None:
    images = re.findall(r"image: (\S+)", (ROOT / "docker-compose.yml").read_text())
    assert f"loadpeak:{__version__}" in images
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)


class Engine:
    """A Docker engine of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = f"unix://{folder}/sock"
        ports = {name: str(port) for name, port in PORTS.items()}
        self.env = {**PASSWORD, **ports, "DOCKER_HOST": self.socket, "DOCKER_BUILDKIT": "0"}
        options = ["--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
        options += ["--pidfile", str(folder / "pid"), "--host", self.socket]
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(["dockerd", *options], stdout=self.log, stderr=self.log)

    def docker(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            ["docker", *arguments],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def answers(self) -> bool:
        return "Server Version" in self.docker("info", check=False)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


@pytest.fixture(scope="module")
def engine(
    need: Callable[[bool, str], None], compose_command: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    parts = [part for part in ("dockerd", "docker", "debootstrap") if shutil.which(part) is None]
    need(os.geteuid() == 0 and not parts, f"a Docker engine takes root, dockerd and debootstrap ({parts})")
    need(sys.version_info[:2] == (3, 11), "the stand-in images have Debian's Python 3.11")
    folder = Path(subprocess.check_output(["mktemp", "-d", "-p", "/var/tmp"], text=True).strip())
    found = Engine(folder)
    try:
        wait_for(found.answers, 60)
        build_images(found, folder)
        yield found
    finally:
        compose(compose_command, "--profile", "demo", "down", "-v", env=found.env)
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


def build_images(engine: Engine, folder: Path) -> None:
    """The images of docker-compose.yml, from Debian packages and this checkout."""
    root = folder / "root"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)],
        check=True,
        capture_output=True,
    )
    archive = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(
        ["docker", "import", "-", "loadpeak-test-base"],
        stdin=archive.stdout,
        env={**os.environ, **engine.env},
        check=True,
        capture_output=True,
    )
    assert archive.stdout is not None
    archive.stdout.close()
    assert archive.wait() == 0
    shutil.rmtree(root)
    context = folder / "context"
    shutil.copytree(STAND_INS, context)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(context / "site")]
    subprocess.run([*pip, f"{ROOT}[page]"], check=True, capture_output=True)
    text = (ROOT / "docker-compose.yml").read_text()
    for image in re.findall(r"image: (\S+)", text):
        target = image.rpartition("/")[2].partition(":")[0]
        engine.docker("build", "--quiet", "--target", target, "--tag", image, str(context))


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def query(expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{PORTS['PROMETHEUS_PORT']}/api/v1/query?query=" + urllib.parse.quote(expression)
    result: list[dict[str, Any]] = fetch(url)["data"]["result"]
    return result


@pytest.fixture(scope="module")
def stack(engine: Engine, compose_command: str) -> Engine:
    started = compose(compose_command, "--profile", "demo", "up", "-d", "--no-build", env=engine.env)
    assert started.returncode == 0, started.stderr
    return engine


def test_every_service_becomes_healthy(stack: Engine) -> None:
    def healthy() -> bool:
        states = stack.docker("ps", "--format", "{{.Names}} {{.Status}}").splitlines()
        return len(states) == 7 and all("(healthy)" in state for state in states)

    wait_for(healthy, 120)


def test_no_service_runs_as_root(stack: Engine) -> None:
    for name in stack.docker("ps", "--format", "{{.Names}}").split():
        assert stack.docker("exec", name, "id", "-u").strip() != "0", name


def test_prometheus_scrapes_the_host_and_the_demo_fleet(stack: Engine) -> None:
    def hosts() -> set[str]:
        return {series["metric"]["host"] for series in query("up == 1")}

    wait_for(lambda: hosts() == {"loadpeak", "v100-01", "v100-02", "v100-03"}, 60)
    wait_for(lambda: len(query("count by (host) (loadpeak_layers_done)")) == 3, 60)


def test_alert_reaches_the_page_within_a_minute_of_the_start(stack: Engine) -> None:
    begun = time.monotonic()

    def alerts() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = fetch(f"http://127.0.0.1:{PORTS['LOADPEAK_SERVE_PORT']}/api/alerts")[
            "alerts"
        ]
        return [alert for alert in found if alert["labels"].get("host") == "v100-02"]

    wait_for(alerts, 60)
    assert time.monotonic() - begun < 60
    assert any("headroom" in json.dumps(alert).lower() for alert in alerts())


def test_grafana_finds_its_data_source_its_dashboards_and_a_password(stack: Engine) -> None:
    found = fetch(f"http://127.0.0.1:{PORTS['GRAFANA_PORT']}/found")
    assert found["datasource"] == "success"
    assert len(found["dashboards"]) == 3
    assert found["home"]
    assert found["password"] == len(PASSWORD["GRAFANA_PASSWORD"])
    assert found["writable"]


def test_data_lives_in_named_volumes(stack: Engine) -> None:
    volumes = stack.docker("volume", "ls", "--format", "{{.Name}}").split()
    for name in ("runs", "prometheus-data", "alertmanager-data", "grafana-data"):
        assert any(volume.endswith(name) for volume in volumes), name
