"""Understand one MoE loader's ``process_weights_after_loading``, or say why it cannot be understood.

The release belongs after the statement with which the loader drops its source weights for good, and before
each ``return`` on whose way something was dropped: every way through the method releases once. A loader
drops sources by ``del layer.w13_weight``, by putting a converted parameter in their place
(``replace_parameter``, ``layer.w13_weight = …``), or by calling a method of its own that does. Local names
that still hold a source at that place are deleted first. What does not fit is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import libcst as cst
from libcst import matchers

T = TypeVar("T", bound=cst.CSTNode)

METHOD = "process_weights_after_loading"
REPLACERS = ("replace_parameter", "_replace_or_register_parameter", "_set_parameter", "set_parameter")
RELEASES = ("empty_cache",)
_INNER = matchers.FunctionDef() | matchers.Lambda()


class Refusal(Exception):
    """The loader is not understood; ``node`` is the place."""

    def __init__(self, node: cst.CSTNode, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Place:
    """Where a release goes.

    Attributes:
        at: the statement after which it goes; before which, where that is a ``return``.
        delete: local names that still hold a source there.
    """

    at: cst.BaseStatement
    delete: tuple[str, ...]

    @property
    def before(self) -> bool:
        """Whether it goes before the statement."""
        return isinstance(self.at, cst.SimpleStatementLine) and isinstance(self.at.body[-1], cst.Return)


def releases(method: cst.FunctionDef) -> bool:
    """Whether the method releases cached blocks already."""
    return any(_called(call) in RELEASES for call in _calls(method.body))


def drops(method: cst.FunctionDef, siblings: dict[str, cst.FunctionDef]) -> bool:
    """Whether the method drops sources at all."""
    layer = _layer_name(method)
    return layer is not None and bool(_dropped(method.body, layer, siblings))


def places(method: cst.FunctionDef, siblings: dict[str, cst.FunctionDef]) -> list[Place]:
    """Find the places in a method that drops sources, in the order of its lines.

    Args:
        method: ``process_weights_after_loading`` of one class.
        siblings: the other methods of the class, by name.

    Raises:
        Refusal: the method is not understood.
    """
    layer = _layer_name(method)
    assert layer is not None, "only methods that drop sources are looked at"
    if not isinstance(method.body, cst.IndentedBlock):
        raise Refusal(method, "its body is on one line")
    body = list(method.body.body)

    def dropped(way: Iterable[cst.BaseStatement]) -> set[str]:
        return {name for statement in way for name in _dropped(statement, layer, siblings)}

    last = max(number for number, statement in enumerate(body) if dropped([statement]))
    found: list[Place] = []
    before, after = body[: last + 1], body[last + 1 :]
    if isinstance(before[-1], cst.For | cst.While | cst.Try) and not _only_replaces(before[-1]):
        raise Refusal(before[-1], "drops sources inside a loop or try block")
    for leaving, way in _returns(before):
        if dropped([leaving]):
            raise Refusal(leaving, "returns in the statement that drops sources")
        if names := dropped(way):
            if not isinstance(leaving, cst.SimpleStatementLine):
                raise Refusal(
                    leaving, "returns inside a loop, a try block or a line after it has dropped sources"
                )
            found.append(Place(leaving, _held(way, [leaving], layer, names)))
    if any(dropped([statement]) for statement in _run_through(before)):
        found.append(Place(before[-1], _held(before, after, layer, dropped(before))))
    if not found:
        raise Refusal(before[-1], "drops sources on no way on which it ends well")
    return found


def _returns(
    block: Sequence[cst.BaseStatement], before: Sequence[cst.BaseStatement] = ()
) -> Iterator[tuple[cst.BaseStatement, list[cst.BaseStatement]]]:
    """What returns in a block, each with the statements on the way to it.

    A ``return`` in a loop, a try block or on the line of its condition comes as the statement around it.
    """
    for number, statement in enumerate(block):
        way = [*before, *block[:number]]
        inner = _branches(statement)
        if inner is not None:
            for branch in inner:
                yield from _returns(branch, way)
        elif next(_descend(statement, cst.Return), None) is not None:
            yield statement, way


def _branches(statement: cst.CSTNode) -> list[Sequence[cst.BaseStatement]] | None:
    """The blocks of an ``if`` or ``with``, of which at most one runs, once; none where one is on one line."""
    bodies: list[cst.BaseSuite] = []
    following: cst.CSTNode | None = statement
    while isinstance(following, cst.If | cst.With | cst.Else):
        bodies.append(following.body)
        following = following.orelse if isinstance(following, cst.If) else None
    blocks = [body.body for body in bodies if isinstance(body, cst.IndentedBlock)]
    return blocks if bodies and len(blocks) == len(bodies) else None


def _run_through(block: Sequence[cst.BaseStatement]) -> Iterator[cst.BaseStatement]:
    """Statements on the ways that come to the end of a block and do not leave the method before."""
    *_, end = block
    if isinstance(end, cst.SimpleStatementLine) and isinstance(end.body[-1], cst.Return | cst.Raise):
        return
    for statement in block:
        branches = _branches(statement)
        if branches is None:
            yield statement
        for branch in branches or ():
            yield from _run_through(branch)


def _only_replaces(loop: cst.CSTNode) -> bool:
    """Whether a loop does nothing else than to put converted parameters in the place of sources."""
    return (
        isinstance(loop, cst.For)
        and isinstance(loop.body, cst.IndentedBlock)
        and all(
            isinstance(statement, cst.SimpleStatementLine)
            and all(isinstance(small, cst.Expr) and _replaces(small.value) for small in statement.body)
            for statement in loop.body.body
        )
    )


def _held(
    way: Sequence[cst.BaseStatement], rest: Sequence[cst.BaseStatement], layer: str, dropped: set[str]
) -> tuple[str, ...]:
    """Local names that still hold a source after a way, which nothing uses any more."""
    held = _aliases(way, layer, dropped)
    inner = [found for statement in way for found in matchers.findall(statement, _INNER)]
    used = {name.value for node in [*rest, *inner] for name in _names(node)}
    for name, assignment in held.items():
        if name in used:
            raise Refusal(assignment, f"the local name {name} holds a source and is used after the drop")
    return tuple(held)


def _layer_name(method: cst.FunctionDef) -> str | None:
    parameters = method.params.params
    return parameters[1].name.value if len(parameters) > 1 else None


def _dropped(statement: cst.CSTNode, layer: str, siblings: dict[str, cst.FunctionDef]) -> set[str]:
    """Names of the layer's attributes that a statement drops, itself or through a method of the class."""
    names = _deleted(statement, layer) | _assigned(statement, layer)
    for call in _calls(statement):
        if _replaces(call) and _is(call.args[0].value, layer):
            text = call.args[1].value
            names |= {str(text.evaluated_value)} if isinstance(text, cst.SimpleString) else {"*"}
        sibling = siblings.get(_called(call) or "") if _on_self(call) else None
        if sibling is not None and any(_is(argument.value, layer) for argument in call.args):
            inner = _layer_name(sibling)
            if inner is not None:
                names |= _dropped(sibling.body, inner, {})
    return names


def _deleted(statement: cst.CSTNode, layer: str) -> set[str]:
    """Attributes that ``del layer.x`` or ``delattr(layer, "x")`` takes away."""
    names = {
        attribute.attr.value
        for deletion in _descend(statement, cst.Del)
        for attribute in _descend(deletion, cst.Attribute)
        if _is(attribute.value, layer)
    }
    for call in _calls(statement):
        if _called(call) == "delattr" and len(call.args) == 2 and _is(call.args[0].value, layer):
            text = call.args[1].value
            names |= {str(text.evaluated_value)} if isinstance(text, cst.SimpleString) else {"*"}
    return names


def _assigned(statement: cst.CSTNode, layer: str) -> set[str]:
    """Weights that get another value by plain assignment."""
    return {
        target.target.attr.value
        for assignment in _descend(statement, cst.Assign)
        for target in assignment.targets
        if isinstance(target.target, cst.Attribute)
        and _is(target.target.value, layer)
        and target.target.attr.value.endswith(("weight", "qweight", "weight_packed"))
    }


def _aliases(
    statements: Iterable[cst.BaseStatement], layer: str, dropped: set[str]
) -> dict[str, cst.CSTNode]:
    """Local names that hold a dropped attribute after the statements, and where they were bound to it."""
    found: dict[str, cst.CSTNode] = {}
    for statement in statements:
        for deletion in _descend(statement, cst.Del):
            for gone in _names(deletion):
                found.pop(gone.value, None)
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for small in statement.body:
            for name, value in _bindings(small):
                found.pop(name, None)
                source = _source(value, layer)
                if source is not None and not dropped.isdisjoint({source, "*"}):
                    found[name] = small
    return found


def _bindings(small: cst.BaseSmallStatement) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Names that an assignment binds, and to what; ``a, b = x, y`` too."""
    if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name) and small.value is not None:
        yield small.target.value, small.value
    if not isinstance(small, cst.Assign):
        return
    for target in (assigned.target for assigned in small.targets):
        names: list[cst.BaseExpression] = [target]
        values = [small.value]
        if isinstance(target, cst.Tuple) and isinstance(small.value, cst.Tuple):
            names = [element.value for element in target.elements]
            values = [element.value for element in small.value.elements]
        for name, value in zip(names, values, strict=False):
            if isinstance(name, cst.Name):
                yield name.value, value


def _source(value: cst.BaseExpression, layer: str) -> str | None:
    """The attribute of the layer that an expression is, through ``.data`` or not."""
    while isinstance(value, cst.Attribute) and value.attr.value == "data":
        value = value.value
    return value.attr.value if isinstance(value, cst.Attribute) and _is(value.value, layer) else None


def _calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    yield from _descend(node, cst.Call)


def _called(call: cst.Call) -> str | None:
    if isinstance(call.func, cst.Name):
        return call.func.value
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else None


def _replaces(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and _called(node) in REPLACERS and len(node.args) > 1


def _on_self(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and _is(call.func.value, "self")


def _is(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def _names(node: cst.CSTNode) -> Iterator[cst.Name]:
    """Every name in a node, those in functions defined inside too."""
    for found in matchers.findall(node, matchers.Name()):
        yield cst.ensure_type(found, cst.Name)


def _descend(node: cst.CSTNode, kind: type[T]) -> Iterator[T]:
    """The node and everything below it of a kind; what functions and classes defined there do is left out."""
    if isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef):
        return
    if isinstance(node, kind):
        yield node
    for child in node.children:
        yield from _descend(child, kind)
