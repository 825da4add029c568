"""The tree keeps its shape: imports run one way, docs know every setting and metric."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

ALLOWED = {
    "profiler/loadpeak": {"loadpeak"},
    "patches/loadpeak_patches": {"loadpeak", "loadpeak_patches"},
    "exporter/loadpeak_exporter": {"loadpeak", "loadpeak_exporter"},
    "dashboards/loadpeak_dashboards": {"loadpeak", "loadpeak_exporter", "loadpeak_dashboards"},
}


def imported(path: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_run_one_way(folder: str) -> None:
    ours = set().union(*ALLOWED.values())
    for path in (ROOT / folder).rglob("*.py"):
        assert imported(path) & ours <= ALLOWED[folder], path


def test_no_module_has_grown_into_two() -> None:
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path
