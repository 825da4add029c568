"""Understand one MoE loader's ``process_weights_after_loading``, or say why it cannot be understood.

The release belongs after the statement with which the loader drops its source weights for good. A
loader drops them by ``del layer.w13_weight``, by putting a converted parameter in their place
(``replace_parameter``, ``layer.w13_weight = …``), or by calling a method of its own that does. Local names
that still hold a source at that place are deleted first. What does not fit is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import libcst as cst

T = TypeVar("T", bound=cst.CSTNode)

METHOD = "process_weights_after_loading"
REPLACERS = ("replace_parameter", "_replace_or_register_parameter", "_set_parameter", "set_parameter")
RELEASES = ("empty_cache",)


class Refusal(Exception):
    """The loader is not understood; ``node`` is the place."""

    def __init__(self, node: cst.CSTNode, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Place:
    """Where the release goes.

    Attributes:
        after: the statement of the method's body after which it goes.
        delete: local names that still hold a source there.
    """

    after: cst.BaseStatement
    delete: tuple[str, ...]


def releases(method: cst.FunctionDef) -> bool:
    """Whether the method releases cached blocks already."""
    return any(_called(call) in RELEASES for call in _calls(method))


def drops(method: cst.FunctionDef, siblings: dict[str, cst.FunctionDef]) -> bool:
    """Whether the method drops sources at all."""
    layer = _layer_name(method)
    return layer is not None and bool(_dropped(method.body, layer, siblings))


def place(method: cst.FunctionDef, siblings: dict[str, cst.FunctionDef]) -> Place:
    """Find the place in a method that drops sources.

    Args:
        method: ``process_weights_after_loading`` of one class.
        siblings: the other methods of the class, by name.

    Raises:
        Refusal: the method is not understood.
    """
    layer = _layer_name(method)
    assert layer is not None, "only methods that drop sources are looked at"
    body = _body(method)
    dropping = [number for number, statement in enumerate(body) if _dropped(statement, layer, siblings)]
    last = dropping[-1]
    if isinstance(body[last], cst.For | cst.While | cst.Try):
        raise Refusal(body[last], "drops sources inside a loop or try block")
    for statement in body[dropping[0] : last + 1]:
        for found in _descend(statement, cst.Return):
            raise Refusal(found, "returns after it has begun to drop sources")
    for statement in body[last + 1 :]:
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Return):
            continue
        for found in _descend(statement, cst.Return):
            raise Refusal(found, "returns from within a block after it has dropped its sources")
    names = {name for number in dropping for name in _dropped(body[number], layer, siblings)}
    held = _aliases(body[: last + 1], layer, names)
    later = {name.value for statement in body[last + 1 :] for name in _loads(statement)}
    for name, assignment in held.items():
        if name in later:
            raise Refusal(assignment, f"the local name {name} holds a source and is used after the drop")
    return Place(after=body[last], delete=tuple(held))


def _layer_name(method: cst.FunctionDef) -> str | None:
    parameters = method.params.params
    return parameters[1].name.value if len(parameters) > 1 else None


def _body(method: cst.FunctionDef) -> list[cst.BaseStatement]:
    if not isinstance(method.body, cst.IndentedBlock):
        raise Refusal(method, "its body is on one line")
    return list(method.body.body)


def _dropped(statement: cst.CSTNode, layer: str, siblings: dict[str, cst.FunctionDef]) -> set[str]:
    """Names of the layer's attributes that a statement drops, itself or through a method of the class."""
    names = _deleted(statement, layer) | _assigned(statement, layer)
    for call in _calls(statement):
        if _called(call) in REPLACERS and len(call.args) > 1 and _is(call.args[0].value, layer):
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
            for gone in _loads(deletion):
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


def _on_self(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and _is(call.func.value, "self")


def _is(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def _loads(node: cst.CSTNode) -> Iterator[cst.Name]:
    yield from _descend(node, cst.Name)


def _descend(node: cst.CSTNode, kind: type[T]) -> Iterator[T]:
    """The node and everything below it of a kind; functions defined inside are left out."""
    if isinstance(node, kind):
        yield node
    for child in node.children:
        if not isinstance(child, cst.FunctionDef | cst.Lambda | cst.ClassDef):
            yield from _descend(child, kind)
