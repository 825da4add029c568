"""A real Prometheus, Alertmanager and VictoriaMetrics over real host services with made-up hosts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadpeak.record import LOAD_PHASES
from loadpeak_dashboards import build
from loadpeak_dashboards.rules import ALERTS, RECORDS
from loadpeak_dashboards.thresholds import HEADROOM_CRITICAL_SHARE
from loadpeak_exporter import replay
from loadpeak_exporter.commands.demo import RECORDED
from loadpeak_exporter.fleet_demo import CARD_BYTES, Act, cast
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunStore
from tests.conftest import ROOT
from tests.integration.watching import Watch, fetch, need_programs
from tests.profiler.test_sampler import wait_for

VIEW = ROOT.parent / "shared" / "grafana-view" / "render.mjs"
SPEED = 4.0
PAGE, PLAYED, OURS, FAILING, KILLED = "page", "v100-01", "v100-02", "v100-03", "v100-04"


@pytest.fixture(scope="module")
def watch(need: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """Hosts: one for the page, one that plays, one for the tests, one that fails, one that was killed."""
    need_programs(need)
    found = Watch(tmp_path_factory.mktemp("watch"))
    try:
        found.start_host(KILLED, "demo", "--story", "tight", "--speed", "1")
        found.start_host(PAGE)
        found.start_host(PLAYED, "demo", "--story", "fixed", "--speed", str(SPEED))
        found.start_host(OURS)
        found.start_host(FAILING, "demo", "--story", "failing", "--speed", str(SPEED))
        wait_for(lambda: any((found.home(KILLED) / "runs").glob("*/rank-3.jsonl")))
        found.start_watching()
        time.sleep(2)
        found.kill(KILLED)
        found.processes[KILLED].wait()
        found.start_host(KILLED, port=found.hosts[KILLED])
        wait_for(lambda: runs_that_are(found, "ready", PLAYED, "moe-layer"), 60)
        wait_for(lambda: runs_that_are(found, "oom", FAILING, "baseline"), 60)
        wait_for(lambda: runs_that_are(found, "killed", KILLED, "baseline"), 30)
        yield found
    finally:
        found.stop()


def runs_that_are(watch: Watch, outcome: str, host: str, variant: str) -> list[str]:
    """Ids of a host's runs with an outcome, as Prometheus knows them."""
    chosen = f'outcome="{outcome}",host="{host}",variant="{variant}"'
    return sorted(series["metric"]["run"] for series in watch.query(f"loadpeak_run_outcome{{{chosen}}} == 1"))


class Play:
    """A startup of four ranks that the test plays on the host of its own."""

    def __init__(self, watch: Watch, folder: Path, run: str, speed: float) -> None:
        self.run, self._home = run, watch.home(OURS)
        cast(RECORDED / "baseline", folder, Act("baseline"))
        self._threads: list[threading.Thread] = replay.start(folder, self._home, run, speed)

    def record(self) -> RunRecord:
        return RunStore(self._home).find(self.run)

    def headroom(self) -> int:
        """The least headroom that the record shows so far."""
        rooms = [rank.load_headroom_bytes for rank in self.record().ranks]
        return min((room for room in rooms if room is not None), default=CARD_BYTES)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


def draw(watch: Watch, name: str, folder: Path, **variables: str) -> dict[str, Any]:
    """The report of grafana-view on a dashboard."""
    report = folder / f"{name}.report.json"
    options = ["--prometheus", watch.url("prometheus"), "--from", "now-2m", "--to", "now"]
    options += ["--scrape-interval", "1s", "--report", str(report), "--out", str(folder / f"{name}.png")]
    for variable, value in variables.items():
        options += ["--var", f"{variable}={value}"]
    dashboard = build.GENERATED / f"{name}.json"
    done = subprocess.run(
        ["node", str(VIEW), str(dashboard), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.fixture(scope="module")
def reports(
    watch: Watch, need: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    need(VIEW.exists(), "grafana-view is not beside the project")
    need(shutil.which("chromium") is not None, "chromium is not installed")
    if shutil.which("node") is None:
        pytest.skip("grafana-view needs Node 20, which Debian 12 does not have")
    folder = tmp_path_factory.mktemp("pictures")
    baseline = runs_that_are(watch, "ready", PLAYED, "baseline")[-1]
    fix = runs_that_are(watch, "ready", PLAYED, "moe-layer")[-1]
    return {
        "startup-live": draw(watch, "startup-live", folder, run=fix),
        "baseline-and-fix": draw(watch, "baseline-and-fix", folder, baseline=baseline, fix=fix),
        "fleet-headroom": draw(watch, "fleet-headroom", folder),
    }


@pytest.mark.parametrize("name", ["startup-live", "baseline-and-fix", "fleet-headroom"])
def test_every_query_of_every_panel_has_data_and_every_panel_is_drawn(
    name: str, reports: dict[str, dict[str, Any]]
) -> None:
    report = reports[name]
    assert report["errors"] == [] == report["browserErrors"]
    for panel in report["panels"]:
        assert panel["status"] in ("ok", "static"), panel
        assert not panel.get("unknownTransformations"), panel
        assert not panel.get("notes"), panel["notes"]
        for query in panel.get("queries", []):
            assert query["series"] > 0 or _phase_too_short_to_see(query["expr"]), query["expr"]


def _phase_too_short_to_see(expression: str) -> bool:
    return any(f'phase="{phase}"' in expression for phase in (*LOAD_PHASES, "kv_cache", "warmup"))


def test_every_rule_is_evaluated_without_error_on_data(watch: Watch) -> None:
    groups = fetch(watch.url("prometheus") + "/api/v1/rules")["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {rule.name for rule in RECORDS} | {rule.name for rule in ALERTS}
    for rule in rules.values():
        assert rule["health"] == "ok", rule
        selectors = set(re.findall(r"(?:loadpeak[:_]\w+|up)(?:\{[^}]*\})?", rule["query"]))
        # No engine runs here, so no exporter inside one is scraped.
        for selector in selectors - {'up{job=~"loadpeak-.+"}'}:
            assert watch.query(f"last_over_time({selector}[5m])"), selector
    for record in RECORDS:
        assert watch.query(record.name), record.name


def test_alerts_of_a_fleet_in_trouble_are_on_the_page(watch: Watch) -> None:
    def raised() -> set[tuple[str, str]]:
        return {(alert["labels"]["alertname"], alert["labels"].get("host", "")) for alert in watch.alerts()}

    expected = {
        ("LoadpeakHeadroomCritical", PLAYED),
        ("LoadpeakCacheFlushed", PLAYED),
        ("LoadpeakOutOfMemory", FAILING),
        ("LoadpeakStartupKilled", KILLED),
    }
    wait_for(lambda: expected <= raised(), 30)
    assert not any(host == PAGE for _, host in raised()), "the host without a run has no alert"


def test_alert_comes_within_15_seconds_of_the_headroom_going(watch: Watch, tmp_path: Path) -> None:
    play = Play(watch, tmp_path, "losing-headroom", speed=1)
    wait_for(lambda: play.headroom() < HEADROOM_CRITICAL_SHARE * CARD_BYTES, 30)
    lost = time.monotonic()

    def told() -> bool:
        return any(
            alert["labels"].get("run") == play.run
            and alert["labels"]["alertname"] == "LoadpeakHeadroomCritical"
            for alert in watch.alerts()
        )

    wait_for(told, 15)
    assert time.monotonic() - lost < 15
    play.join()


def test_missed_scrape_loses_no_peak(watch: Watch, tmp_path: Path) -> None:
    play = Play(watch, tmp_path, "missed-scrape", speed=2)
    mine = f'run="{play.run}"'
    wait_for(lambda: watch.value(f"max(loadpeak_layers_done{{{mine}}})"), 20)
    watch.kill(OURS, signal.SIGSTOP)
    wait_for(lambda: all(rank.layers_done == 48 for rank in play.record().ranks), 20)
    time.sleep(2)
    watch.kill(OURS, signal.SIGCONT)
    play.join()
    wait_for(lambda: watch.value(f'min(loadpeak_run_outcome{{{mine},outcome="ready"}})') == 1, 20)
    down = watch.value(f'min_over_time(up{{host="{OURS}"}}[1m])')
    seen = watch.value(f"max(max_over_time(loadpeak_device_used_bytes{{{mine}}}[2m]))")
    for rank in play.record().ranks:
        of_rank = f'{mine},rank="{rank.rank}"'
        peak = watch.value(f"max(loadpeak_device_used_peak_bytes{{{of_rank}}})")
        assert peak == rank.device_used_peak_bytes
        assert (seen or 0) < (peak or 0), "the scrapes did miss it"
        layers = watch.query(f"loadpeak_layer_reserved_peak_bytes{{{of_rank}}}")
        exported = {int(series["metric"]["layer"]): float(series["value"][1]) for series in layers}
        assert exported == {layer.layer: layer.reserved_peak_bytes for layer in rank.layers}
    assert down == 0


def test_victoria_metrics_takes_the_remote_write_and_answers_the_same(
    watch: Watch, reports: dict[str, dict[str, Any]]
) -> None:
    """Panels of runs that have ended give the same figures; the others have data."""
    wait_for(lambda: watch.query("loadpeak:last_ready_load_peak_bytes", "victoria-metrics"), 30)

    def answer(expression: str, server: str) -> dict[str, float]:
        return {
            json.dumps(series["metric"], sort_keys=True): float(series["value"][1])
            for series in watch.query(expression, server)
            if series["value"][1] != "NaN"
        }

    compared = 0
    for panel in reports["baseline-and-fix"]["panels"]:
        for query in panel.get("queries", []):
            if "$__interval" in query["expr"] or query["kind"] != "instant":
                continue
            expected = answer(query["expr"], "prometheus")
            assert answer(query["expr"], "victoria-metrics") == expected, query["expr"]
            compared += bool(expected)
    assert compared > 10
    for record in RECORDS:
        assert answer(f"last_over_time({record.name}[1m])", "victoria-metrics"), record.name
    for panel in reports["fleet-headroom"]["panels"]:
        for query in panel.get("queries", []):
            assert answer(f"last_over_time(({query['expr']})[1m:1s])", "victoria-metrics"), query["expr"]
