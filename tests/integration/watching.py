"""Host services of a made-up fleet, and the Prometheus and its companions that watch them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT, free_port
from tests.exporter.test_run_command import LOADPEAK
from tests.profiler.test_sampler import wait_for

PROVISIONING = ROOT / "dashboards" / "provisioning"
RULES = ROOT / "dashboards" / "generated" / "rules.yml"
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "victoria-metrics")


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except OSError:
        return False
    return True


class Watch:
    """Everything runs on the loopback, with the configuration files that the project ships."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: free_port() for name in ("prometheus", "alertmanager", "victoria-metrics")}

    def home(self, host: str) -> Path:
        return self.folder / host

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.hosts.get(name) or self._ports[name]}"

    def start_host(self, name: str, *command: str, port: int | None = None) -> None:
        """``loadpeak serve``, or the command given, as one host of the fleet."""
        self.hosts[name] = port or free_port()
        self.home(name).mkdir(exist_ok=True)
        self._run(
            name,
            [*LOADPEAK, *(command or ("serve",))],
            LOADPEAK_HOME=str(self.home(name)),
            LOADPEAK_SERVE_PORT=str(self.hosts[name]),
        )
        wait_for(lambda: answers(self.url(name) + "/healthz"), 20)

    def start_watching(self) -> None:
        """Prometheus with the shipped rules, Alertmanager, VictoriaMetrics that takes the remote write."""
        address = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        config = yaml.safe_load((PROVISIONING / "prometheus.yml").read_text())
        config["rule_files"] = [str(RULES)]
        config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [address["alertmanager"]]}]}]
        config["remote_write"] = [{"url": f"http://{address['victoria-metrics']}/api/v1/write"}]
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"host": name}} for name, port in self.hosts.items()
        ]
        config["scrape_configs"] = [{"job_name": "loadpeak", "static_configs": targets}]
        route = yaml.safe_load((PROVISIONING / "alertmanager.yml").read_text())
        (webhook,) = route["receivers"][0]["webhook_configs"]
        webhook["url"] = webhook["url"].replace("http://loadpeak:9839", self.url(next(iter(self.hosts))))
        for name, body in (("prometheus", config), ("alertmanager", route)):
            (self.folder / f"{name}.yml").write_text(yaml.safe_dump(body))
        commands = {
            "victoria-metrics": "victoria-metrics -storageDataPath={data} -httpListenAddr={address} "
            "-search.latencyOffset=0s",
            "alertmanager": "prometheus-alertmanager --config.file={config} --storage.path={data} "
            "--web.listen-address={address} --cluster.listen-address=",
            "prometheus": "prometheus --config.file={config} --storage.tsdb.path={data} "
            "--web.listen-address={address}",
        }
        for name, command in commands.items():
            place = self.folder / name
            self._run(
                name, command.format(data=place, config=f"{place}.yml", address=address[name]).split(" ")
            )
        for name in commands:
            ready = self.url(name) + ("/health" if name == "victoria-metrics" else "/-/ready")
            wait_for(partial(answers, ready), 30)

    def query(self, expression: str, server: str = "prometheus") -> list[dict[str, Any]]:
        """An instant query."""
        found = fetch(self.url(server) + "/api/v1/query?query=" + urllib.parse.quote(expression))
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def value(self, expression: str, server: str = "prometheus") -> float | None:
        """The value of a query with one series, none if there is no series."""
        result = self.query(expression, server)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def alerts(self) -> list[dict[str, Any]]:
        """What the page of the first host shows."""
        found: list[dict[str, Any]] = fetch(self.url(next(iter(self.hosts))) + "/api/alerts")["alerts"]
        return found

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, name: str, command: list[str], **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=log, stderr=log
            )


def need_programs(need: Callable[[bool, str], None]) -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    need(not missing, f"not installed: {', '.join(missing)}")
