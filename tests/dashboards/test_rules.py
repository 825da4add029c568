"""The alerts, by promtool: when they fire and when they are quiet."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from loadpeak_dashboards import thresholds
from loadpeak_dashboards.rules import ALERTS, RECORDS, RUNBOOKS
from tests.conftest import ROOT

CASES = Path(__file__).parent / "alerts.yml"
RULES = ROOT / "dashboards" / "generated" / "rules.yml"


@pytest.fixture(scope="module")
def promtool(need: Callable[[bool, str], None]) -> Callable[..., subprocess.CompletedProcess[str]]:
    need(shutil.which("promtool") is not None, "promtool is not installed")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)

    return call


def test_rules_are_accepted(promtool: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RECORDS) + len(ALERTS)} rules found" in done.stdout


def test_alerts_fire_and_are_quiet_as_written(
    promtool: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = promtool("test", "rules", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_cases_fail_with_other_thresholds(
    promtool: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    text = RULES.read_text()
    for share in (thresholds.HEADROOM_CRITICAL_SHARE, thresholds.HEADROOM_WARNING_SHARE):
        text = text.replace(f"ratio < {share}", f"ratio < {share / 10}")
    (tmp_path / "rules.yml").write_text(text)
    cases = yaml.safe_load(CASES.read_text())
    cases["rule_files"] = [str(tmp_path / "rules.yml")]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    assert promtool("test", "rules", str(tmp_path / "cases.yml")).returncode != 0


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_every_alert_has_a_firing_and_a_quiet_case(alert: object) -> None:
    name = alert.name  # type: ignore[attr-defined]
    fires, quiet = False, False
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for expected in case.get("alert_rule_test", []):
            if expected["alertname"] == name:
                fires |= bool(expected.get("exp_alerts"))
                quiet |= not expected.get("exp_alerts")
        for expected in case.get("promql_expr_test", []):
            fires |= f'alertname="{name}"' in expected["expr"]
    assert fires
    assert quiet


@pytest.mark.parametrize("alert", ALERTS, ids=[alert.name for alert in ALERTS])
def test_every_alert_says_the_figure_what_to_do_and_where_to_read_on(alert: object) -> None:
    rule = alert.rule(RUNBOOKS, hosts=True)  # type: ignore[attr-defined]
    annotations = rule["annotations"]
    assert "$value" in annotations["description"]
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    page = ROOT / annotations["runbook_url"]
    text = page.read_text()
    assert page.parent == ROOT / RUNBOOKS
    assert rule["alert"] in text
    for heading in ("## What it means", "## What to do"):
        assert heading in text
    assert len(re.findall(r"\w+", text)) > 80
