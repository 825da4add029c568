"""The generated dashboards: what Grafana's published schemas and an operator ask of them."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from loadpeak.errors import CommandError
from loadpeak_dashboards import build, links
from loadpeak_dashboards.queries import metric
from loadpeak_exporter.catalogue import CATALOGUE
from tests.conftest import ROOT
from tests.exporter.test_compare import invoke

SCHEMAS = ROOT.parent / "shared" / "grafana-schema"
FILES = build.build()
DASHBOARDS = {name: json.loads(text) for name, text in FILES.items() if name.endswith(".json")}
EVERY = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=list(DASHBOARDS))
LEGACY = {"yaxes", "xaxis", "seriesOverrides", "nullPointMode", "rows", "style", "hideControls"}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def any_is_any(schema: Any) -> Any:
    """The schemas write Grafana's ``any`` as an object with any keys; texts and numbers are meant too."""
    if isinstance(schema, list):
        return [any_is_any(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "object" and schema.get("additionalProperties") == {}:
        return {}
    return {key: any_is_any(inner) for key, inner in schema.items()}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.fixture(scope="module")
def check(need: Callable[[bool, str], None]) -> Callable[[Any, str, str], None]:
    """Validate a value against a definition of one of Grafana's schema files."""
    need(SCHEMAS.is_dir(), "Grafana's schemas are not beside the project")

    def validate(value: Any, file: str, definition: str) -> None:
        schema = any_is_any(json.loads((SCHEMAS / f"{file}.jsonschema.json").read_text()))
        schema["$ref"] = f"#/definitions/{definition}"
        jsonschema.Draft7Validator(schema).validate(value)

    return validate


def test_committed_files_are_what_is_built(tmp_path: Path) -> None:
    assert build.differences(build.GENERATED, FILES) == []
    assert build.build() == FILES, "built twice, it is the same"


def test_build_writes_and_check_finds_what_was_changed(tmp_path: Path) -> None:
    assert invoke("dashboards", "build", "--out", str(tmp_path)).exit_code == 0
    assert invoke("dashboards", "build", "--check", "--out", str(tmp_path)).exit_code == 0
    (tmp_path / "rules.yml").write_text("groups: []\n")
    (tmp_path / "old.json").write_text("{}")
    refused = invoke("dashboards", "build", "--check", "--out", str(tmp_path))
    assert "old.json, rules.yml" in str(refused.exception)
    invoke("dashboards", "build", "--out", str(tmp_path))
    assert (tmp_path / "rules.yml").read_text() == FILES["rules.yml"]
    assert (tmp_path / "old.json").read_text() == "{}", "what others put there stays"


@EVERY
def test_dashboard_validates(dashboard: dict[str, Any], check: Callable[[Any, str, str], None]) -> None:
    check(dashboard, "dashboard", "Dashboard")
    for panel in panels(dashboard):
        kind = panel["type"].replace("-", "")
        check(panel["options"], kind, "Options")
        if "custom" in panel["fieldConfig"]["defaults"]:
            check(panel["fieldConfig"]["defaults"]["custom"], kind, "FieldConfig")
        for target in panel["targets"]:
            check(target, "prometheus", "Dataquery")


def test_check_finds_an_option_that_does_not_exist(check: Callable[[Any, str, str], None]) -> None:
    (panel, *_) = panels(DASHBOARDS["startup-live.json"])
    with pytest.raises(jsonschema.ValidationError):
        check({**panel["options"], "gauge": {"show": True}}, "stat", "Options")
    with pytest.raises(jsonschema.ValidationError):
        check({**DASHBOARDS["startup-live.json"], "rows": []}, "dashboard", "Dashboard")


@EVERY
def test_no_legacy_keys(dashboard: dict[str, Any]) -> None:
    assert not LEGACY & set(keys(dashboard))
    for panel in panels(dashboard):
        assert "maxDataPoints" not in panel
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None


@EVERY
def test_every_panel_says_what_it_shows(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert all(place["datasource"]["uid"] == "${datasource}" for place in (panel, *panel["targets"]))


@EVERY
def test_per_layer_panels_have_the_layer_on_the_x_axis(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        if any("loadpeak_layer_" in target["expr"] for target in panel["targets"]):
            assert panel["type"] == "trend"
            assert panel["options"]["xField"] == "layer"


@EVERY
def test_peaks_survive_down_sampling(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        for target in panel["targets"] if panel["type"] == "timeseries" else []:
            memory = re.findall(r"\w+\(loadpeak_(?:device_used|allocator)_\w*bytes", target["expr"])
            assert all(found.startswith("max_over_time(") for found in memory), target["expr"]


@EVERY
def test_queries_use_only_metrics_of_the_catalogue(dashboard: dict[str, Any]) -> None:
    known = {found.name for found in CATALOGUE}
    used = set(re.findall(r"loadpeak_\w+", json.dumps([*dashboard["panels"], dashboard["templating"]])))
    assert used <= known
    assert used


def test_query_for_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="loadpeak_nonsense is not in the metric catalogue"):
        metric("nonsense")


@EVERY
def test_variables_cascade(dashboard: dict[str, Any]) -> None:
    variables = {found["name"]: found for found in dashboard["templating"]["list"]}
    assert [*variables][:3] == ["datasource", "model", "host"]
    assert 'model=~"$model"' in variables["host"]["query"]
    for name in [*variables][3:]:
        assert 'host=~"$host"' in variables[name]["query"]
        assert variables[name]["label"]


@EVERY
def test_panels_are_on_the_grid_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_links_lead_from_the_fleet_to_a_run_and_to_a_comparison() -> None:
    fleet = json.dumps(DASHBOARDS["fleet-headroom.json"])
    assert f"/d/{links.LIVE_UID}?var-run=${{__value.raw}}" in fleet
    assert f"/d/{links.COMPARISON_UID}?var-fix=" in fleet
    uids = {dashboard["uid"] for dashboard in DASHBOARDS.values()}
    for dashboard in DASHBOARDS.values():
        assert all(link["url"].removeprefix("/d/") in uids for link in dashboard["links"])
        assert len(dashboard["links"]) == 2


def test_runbooks_can_be_elsewhere(tmp_path: Path) -> None:
    url = "https://wiki.example/runbooks/"
    invoke("dashboards", "build", "--out", str(tmp_path), "--runbooks", url)
    assert f"runbook_url: {url}headroom.md" in (tmp_path / "rules.yml").read_text()
    assert f"runbook_url: {url}headroom.md" in (tmp_path / "kubernetes" / "prometheusrule.yaml").read_text()


def test_manifests_carry_the_same_rules_and_dashboards() -> None:
    rule = yaml.safe_load(FILES["kubernetes/prometheusrule.yaml"])
    assert rule["kind"] == "PrometheusRule"
    text = FILES["rules.yml"].replace(' or absent(up{job="loadpeak"})', "")
    assert rule["spec"] == yaml.safe_load(text), "no host service is expected there"
    assert text != FILES["rules.yml"]
    for name, dashboard in DASHBOARDS.items():
        config = yaml.safe_load(FILES[f"kubernetes/dashboard-{name.removesuffix('.json')}.yaml"])
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(config["data"][name]) == dashboard
        assert len(FILES[f"kubernetes/dashboard-{name.removesuffix('.json')}.yaml"]) < 1 << 20
    monitor = yaml.safe_load(FILES["kubernetes/podmonitor.yaml"])
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "1s"


@pytest.mark.parametrize("out", ["/proc/x", "/etc/passwd"])
def test_folder_that_cannot_be_written_is_one_clear_line(out: str) -> None:
    error = invoke("dashboards", "build", "--out", out).exception
    assert isinstance(error, CommandError)
    assert f"{out} cannot be written" in str(error)
