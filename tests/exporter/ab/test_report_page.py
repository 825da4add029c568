"""The HTML report in a real Chromium, opened from its file."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadpeak.errors import CommandError
from loadpeak_exporter import reports
from loadpeak_exporter.ab.records import Arm
from loadpeak_exporter.store import RunStore
from tests.exporter.ab.making import BASELINE, RELEASE, change, evidence, experiment, with_startup
from tests.exporter.test_page import Page

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

EVIL = "</script><script>document.title='hacked'</script>"
SPLIT = Arm(name="split <i>&amp; <img src=x onerror=document.title='hacked'>", split_limit="keep")
PLAN = experiment(BASELINE, RELEASE, SPLIT, pairs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two reports: an experiment with three arms, and a run."""
    home = tmp_path_factory.mktemp("home")
    found = evidence(home, PLAN)
    found = change(found, "release", 1, with_startup(note=EVIL))
    store = RunStore(home)
    (home / "ab.html").write_text(reports.render(reports.of_experiment(PLAN, found, store, False), "html"))
    (home / "run.html").write_text(reports.render(reports.of_run(store.find("baseline-1"), store), "html"))
    return home


@pytest.fixture
def page(browser: WebDriver, folder: Path) -> Iterator[Page]:
    found = Page(browser, folder.as_uri() + "/")
    found.errors()
    yield found
    assert found.errors() == []


def test_arms_are_laid_over_each_other(page: Page) -> None:
    text = page.open("ab.html").says("The gate did not pass: 15 passed, 1 failed.", "Loading times")
    assert "rank 0 720 → 720 MiB is not lower" in text
    names = ["baseline", "release", escape(SPLIT.name, quote=False)]
    time, layers = page.curves("time"), page.curves("layers")
    assert [curve["name"] for curve in time] == names
    assert [curve["name"] for curve in layers] == [
        f"{name}, {what}" for name in names for what in ("peak inside", "after")
    ]
    after = {curve["name"]: curve["y"] for curve in layers}
    assert after["baseline, after"] == pytest.approx([(130 + 30 * n) / 1024 for n in range(4)])
    assert after["release, after"] == pytest.approx([100 / 1024] * 4)


def test_run_has_its_timeline_with_phases(page: Page) -> None:
    page.open("run.html").says("loadpeak run baseline-1", "Phases of rank 0", "across layers")
    assert [curve["name"] for curve in page.curves("time")] == ["device used", "reserved", "allocated"]
    shapes = page.browser.execute_script("return document.getElementById('time').layout.shapes.length")
    assert shapes == 2


def test_text_of_others_is_no_markup(page: Page, folder: Path) -> None:
    page.open("ab.html").says(EVIL)
    page.curves("time")
    legend = "return [...document.querySelectorAll('#time .legendtext')].map((text) => text.textContent)"
    assert page.browser.execute_script(legend) == ["baseline", "release", SPLIT.name]
    assert page.browser.title == "loadpeak A/B: awq"
    assert "\\u003cimg src=x" in (folder / "ab.html").read_text(), "names in the charts' data"


def test_page_needs_nothing_but_its_file(page: Page) -> None:
    page.open("ab.html")
    page.curves("time")
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    loaded = [name for name in page.browser.execute_script(script) if not name.startswith("data:")]
    assert loaded == []


@pytest.mark.parametrize("name", ["ab.html", "run.html"])
def test_narrow_screen_has_no_sideways_scroll(page: Page, name: str) -> None:
    page.browser.set_window_size(500, 900)
    try:
        page.open(name)
        page.curves("time")
        wide, shown = page.browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= shown
    finally:
        page.browser.set_window_size(1400, 1000)


def test_without_plotly_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.resources, "files", missing)
    store = RunStore(folder)
    report = reports.of_run(store.find("baseline-1"), store)
    with pytest.raises(CommandError, match="pip install plotly"):
        reports.render(report, "html")
    assert reports.render(report, "md")
