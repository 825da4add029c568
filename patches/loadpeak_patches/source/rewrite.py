"""Insert the release into a file's MoE loaders, keeping every other byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from loadpeak_patches.source import loaders
from loadpeak_patches.targets import TARGETS

RELEASE = """\
# loadpeak: the source weights are gone; give their cached blocks back to the device.
if torch.cuda.is_available():
    torch.cuda.empty_cache()
"""

BYTE_ORDER_MARK = "\ufeff"
State = Literal["applicable", "there", "refused"]


class Finding(NamedTuple):
    """One loader of a file: its class, the line of the place, and what can be done with it."""

    loader: str
    line: int
    state: State
    reason: str = ""


def rewrite(source: str) -> tuple[str, list[Finding]]:
    """A file's text with the release in it, and what was found.

    Raises:
        libcst.ParserSyntaxError: it is not Python that libcst understands.
    """
    mark = source[: source.startswith(BYTE_ORDER_MARK)]
    wrapper = MetadataWrapper(cst.parse_module(source.removeprefix(mark)), unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    findings: list[Finding] = []
    changes: list[loaders.Place] = []
    for owner, method, siblings in _loaders(wrapper.module):
        line = positions[method].start.line
        try:
            if not loaders.drops(method, siblings):
                continue
            if loaders.releases(method):
                findings.append(Finding(owner, line, "there"))
                continue
            found = loaders.places(method, siblings)
            if not _imports_torch(wrapper.module):
                raise loaders.Refusal(method, "the file does not import torch")
            changes += found
            findings.append(Finding(owner, positions[found[-1].at].end.line, "applicable"))
        except loaders.Refusal as refusal:
            place = positions[refusal.node].start.line
            findings.append(Finding(owner, place, "refused", refusal.reason))
    return mark + wrapper.module.visit(_Insert(changes)).code, findings


def _loaders(
    module: cst.Module,
) -> Iterator[tuple[str, cst.FunctionDef, dict[str, cst.FunctionDef]]]:
    """MoE loader classes of a module: name, method, and the other methods."""
    known = {target.name for target in TARGETS}
    for statement in module.body:
        if not isinstance(statement, cst.ClassDef) or not isinstance(statement.body, cst.IndentedBlock):
            continue
        name = statement.name.value
        bases = [module.code_for_node(base.value) for base in statement.bases]
        if name not in known and not any(base.endswith(("MoEMethod", "MoEMethodBase")) for base in bases):
            continue
        methods = {
            member.name.value: member for member in statement.body.body if isinstance(member, cst.FunctionDef)
        }
        if loaders.METHOD in methods:
            yield name, methods.pop(loaders.METHOD), methods


def _imports_torch(module: cst.Module) -> bool:
    return any(
        isinstance(small, cst.Import)
        and any(alias.evaluated_name == "torch" and alias.asname is None for alias in small.names)
        for statement in module.body
        if isinstance(statement, cst.SimpleStatementLine)
        for small in statement.body
    )


class _Insert(cst.CSTTransformer):
    def __init__(self, places: list[loaders.Place]) -> None:
        super().__init__()
        self._places: dict[cst.CSTNode, loaders.Place] = {place.at: place for place in places}

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel:
        left: cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel
        left = super().on_leave(original_node, updated_node)
        place = self._places.get(original_node)
        if place is None or not isinstance(left, cst.CSTNode):
            return left
        texts = [f"del {', '.join(place.delete)}"] if place.delete else []
        added = [cst.parse_statement(text) for text in [*texts, RELEASE]]
        return cst.FlattenSentinel([*added, left] if place.before else [left, *added])
