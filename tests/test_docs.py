"""The generated pages are up to date, and the README's commands exist."""

import importlib.util
import re
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

from loadpeak_exporter.exposition import Exposition
from tests.conftest import ROOT
from tests.exporter.building import Startup
from tests.exporter.test_metrics import parse, run_of


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", generator().PAGES)
def test_generated_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == generator().PAGES[name](), "run `make docs`"


def test_formula_for_the_number_of_series_is_an_upper_bound(tmp_path: Path) -> None:
    run = run_of(Startup(tmp_path, release="layer").load(12).ready())
    assert len(parse(Exposition().render([run]))) <= generator()._series(1, 12)


def test_links_of_the_readme_and_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_that_the_readme_names_exists() -> None:
    commands = {entry.name for entry in entry_points(group="loadpeak.commands")}
    for name in re.findall(r"(?<!/)loadpeak (\w+) ", (ROOT / "README.md").read_text()):
        assert name in commands | {"records", "only", "while"}, name
