"""A real Chromium for the pages."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[WebDriver]:
    """A browser without a screen; the folder is for its own files."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        found.set_window_size(1400, 1000)
        yield found
    finally:
        found.quit()


@pytest.fixture(scope="session")
def browser(
    need: Callable[[bool, str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebDriver]:
    programs = shutil.which("chromium") and shutil.which("chromedriver")
    need(bool(programs), "chromium and chromedriver are not installed")
    need(importlib.util.find_spec("selenium") is not None, "selenium is not installed")
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found
