"""Build everything that is made from this code, byte for byte the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from loadpeak_dashboards import comparison, fleet, kubernetes, rules, startup_live
from loadpeak_dashboards.grafana import dashboard_json

GENERATED = Path(__file__).parent.parent / "generated"
"""Where the built files are committed, in a checkout."""


def build(runbooks: str = rules.RUNBOOKS) -> Mapping[str, str]:
    """Every file, by its path in the output folder.

    Args:
        runbooks: where alerts say that their runbooks are.
    """
    dashboards, rule_file = _dashboards(), rules.rules(runbooks)
    manifests = kubernetes.manifests(rules.rules(runbooks, hosts=False), dashboards)
    return {
        **dashboards,
        "rules.yml": to_yaml(rule_file),
        **{f"kubernetes/{name}": to_yaml(body) for name, body in manifests.items()},
    }


def _dashboards() -> dict[str, str]:
    return {
        "startup-live.json": dashboard_json(startup_live.build()),
        "baseline-and-fix.json": dashboard_json(comparison.build()),
        "fleet-headroom.json": dashboard_json(fleet.build()),
    }


class _Dumper(yaml.SafeDumper):
    """Long texts as blocks, so that people can read them."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(body: object) -> str:
    """YAML with keys in the order they were put in."""
    head = "# Built by `loadpeak dashboards build`; do not edit.\n"
    text: str = yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    return head + text


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files; others in the folder stay."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def differences(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Names of files that are missing, differ or are too many."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    changed = {name for name in files if name in there and (folder / name).read_text() != files[name]}
    return sorted(changed | (there ^ set(files)))
