"""The built-in page in a real Chromium."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadpeak_exporter import serve_settings
from loadpeak_exporter.host import Host
from loadpeak_exporter.host_app import create_host_app
from loadpeak_exporter.server import Server, bind
from loadpeak_exporter.store import RunStore
from tests.exporter.building import Startup
from tests.profiler.test_sampler import wait_for

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Startup(tmp_path, "base", variant="baseline", created_at_wall_seconds=1.0).load(4).ready()
    Startup(tmp_path, "fixed", variant="moe-layer", release="layer", created_at_wall_seconds=2.0).load(
        4
    ).ready()
    (tmp_path / "runs" / "broken").mkdir()
    return tmp_path


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    store = RunStore(home, Host(None, None, wall=lambda: 0.0))
    server = Server(create_host_app(store, serve_settings.load({})), bind("127.0.0.1", 19938))
    server.start()
    yield f"http://127.0.0.1:{server.port}/"
    server.stop()


class Page:
    """The page as a person uses it: what it says, and where one clicks."""

    def __init__(self, browser: WebDriver, url: str) -> None:
        self.browser, self.url = browser, url

    def errors(self) -> list[dict[str, Any]]:
        """What the browser has complained about since the last call."""
        log: list[dict[str, Any]] = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        return [line for line in log if line["level"] == "SEVERE"]

    def open(self, place: str = "") -> Page:
        self.browser.get("about:blank")
        self.browser.get(self.url + place)
        return self

    def says(self, *words: str, seconds: float = 10, every: float = 0.1) -> str:
        """The page's text, once it has all these words."""
        deadline = time.monotonic() + seconds
        while True:
            text: str = self.browser.execute_script("return document.body.innerText")
            if all(word in text for word in words):
                return text
            assert time.monotonic() < deadline, f"{words} never came: {text}"
            time.sleep(every)

    def curves(self, chart: str) -> list[dict[str, Any]]:
        """Names and points of a chart's curves, as drawn."""
        script = """
            const place = document.getElementById(arguments[0]);
            return (place?.data ?? []).map((curve) => ({name: curve.name, x: curve.x, y: curve.y}));
        """
        deadline = time.monotonic() + 10
        while not (found := self.browser.execute_script(script, chart)):
            assert time.monotonic() < deadline, f"{chart} was not drawn"
            time.sleep(0.1)
        curves: list[dict[str, Any]] = found
        return curves

    def click(self, text: str) -> None:
        from selenium.webdriver.common.by import By

        self.browser.find_element(By.XPATH, f"//*[self::button or self::a][contains(., '{text}')]").click()


@pytest.fixture
def page(browser: WebDriver, url: str) -> Iterator[Page]:
    found = Page(browser, url)
    found.errors()
    yield found
    assert found.errors() == []


def test_page_opens_with_the_newest_run(page: Page) -> None:
    text = page.open().says("base", "fixed", "broken", "device peak, MiB")
    assert "moe-layer" in text
    assert page.browser.title == "loadpeak"


def test_run_shows_figures_timeline_and_layers(page: Page) -> None:
    page.open("#/run/base").says("baseline · ready", "720", "32,048", "layers\n4")
    assert [curve["name"] for curve in page.curves("time")] == ["device used", "reserved", "allocated"]
    reserved = next(curve for curve in page.curves("layers") if curve["name"] == "reserved after")
    assert reserved["x"] == [0, 1, 2, 3]
    assert reserved["y"] == pytest.approx([(130 + 30 * n) / 1024 for n in range(4)])
    shapes = page.browser.execute_script("return document.getElementById('time').layout.shapes.length")
    assert shapes == 2, "a shade for each phase"


def test_page_follows_a_run_that_grows(page: Page, home: Path) -> None:
    startup = Startup(home, "growing", variant="live", created_at_wall_seconds=3.0)
    startup.session.start_phase("process_weights")
    startup.session.model(range(8), range(8), 8)
    startup.convert(0)
    page.open("#/run/growing").says("live · loading", "1 of 8")
    before = len(page.curves("time")[0]["x"])
    for layer in (1, 2):
        startup.convert(layer)
    page.says("3 of 8")
    wait_for(lambda: len(page.curves("time")[0]["x"]) > before)
    for layer in range(3, 8):
        startup.convert(layer)
    startup.session.end_phase()
    startup.ready()
    page.says("live · ready")


def test_two_runs_are_laid_over_each_other(page: Page) -> None:
    page.open("#/run/base").says("Compare")
    for side, run in (("baseline", "base"), ("fix", "fixed")):
        page.browser.execute_script(f"document.querySelector('[name={side}]').value = '{run}'")
    page.click("Compare")
    text = page.says("worst load peak 90 MiB lower")
    assert "equal to the byte on every rank" in text
    curves = {curve["name"]: curve for curve in page.curves("layers")}
    assert curves["baseline, after"]["x"] == curves["moe-layer, after"]["x"] == [0, 1, 2, 3]
    assert [curve["name"] for curve in page.curves("time")] == ["baseline", "moe-layer"]
    assert all(curve["x"][0] < 1 for curve in page.curves("time")), "seconds since start, not clock time"


def test_damaged_run_is_shown_as_such(page: Page) -> None:
    page.open("#/run/broken").says("This run is damaged.", "run.json: is not there")


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("#/run/%E0%A4%A", "no run '%E0%A4%A'"),
        ("#/run/none", "no run 'none'"),
        ("#/run/base/7", "run base has no rank 7; its ranks are: 0"),
        ("#/run/base/x", "query.rank: Input should be a valid integer"),
        ("#/compare/base/none", "no run 'none'"),
    ],
)
def test_place_that_does_not_exist_is_one_clear_line(page: Page, place: str, line: str) -> None:
    page.open("#/run/base").says("baseline · ready")
    page.browser.execute_script("location.hash = arguments[0]", place)
    text = page.says(line, "fixed", "broken")
    assert "device peak" not in text, "no figures of another run or rank"
    assert "Compare" in text
    page.browser.get("about:blank")
    assert page.errors() != [], "the browser notes what the API refused"


@pytest.mark.parametrize("place", ["#/run", "#/compare/base", "#/none"])
def test_place_without_a_name_leads_to_the_newest_run(page: Page, place: str) -> None:
    page.open(place).says("moe-layer · ready", "device peak, MiB")


def test_rank_is_shown_that_is_asked_for_or_the_first_there_is(page: Page, home: Path) -> None:
    for rank in (8, 9):
        Startup(home, "second-host", rank=rank, created_at_wall_seconds=3.0).load(rank).ready()
    page.open("#/run/second-host").says("baseline · ready", "layers\n8")
    page.curves("time")
    page.click("rank 9")
    page.says("layers\n9")


def test_run_with_a_damaged_line_says_which(page: Page, home: Path) -> None:
    with (home / "runs" / "base" / "rank-0.jsonl").open("ab") as file:
        file.write(b"\x00garbage\n")
    page.open("#/run/base").says("baseline · ready", "rank-0.jsonl line")


def test_names_cannot_inject_markup(page: Page, home: Path) -> None:
    name = "<img src=x onerror=document.title='hacked'>"
    Startup(home, "evil", variant=name, model=name, created_at_wall_seconds=9.0).load().ready()
    page.open("#/run/evil").says("<img src=x")
    assert page.browser.title == "loadpeak"


def test_firing_alert_stands_above_everything(page: Page) -> None:
    body = {
        "alerts": [
            {
                "status": "firing",
                "labels": {"alertname": "LoadpeakHeadroomLow", "severity": "critical"},
                "annotations": {"summary": "headroom is 1 GiB"},
                "fingerprint": "a",
            }
        ]
    }
    request = urllib.request.Request(page.url + "api/alerts", json.dumps(body).encode(), method="POST")
    urllib.request.urlopen(request, timeout=5).close()
    page.open().says("LoadpeakHeadroomLow", "headroom is 1 GiB")


def test_narrow_screen_has_no_sideways_scroll(page: Page) -> None:
    page.browser.set_window_size(500, 900)
    try:
        page.open("#/compare/base/fixed").says("worst device peak")
        page.curves("time")
        wide, shown = page.browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= shown
    finally:
        page.browser.set_window_size(1400, 1000)
