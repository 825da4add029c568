"""Number the layers of a model from its module names.

A decoder layer is a stack's name and a number in a module path: ``model.layers.12.mlp.experts``
belongs to layer 12 of the stack ``model.layers``. Stacks that come later (a vision tower's blocks, a
draft model's layers) are numbered on from the highest number so far, so a layer's number is unique
in the rank and, for a plain model, is the number its authors gave it, on every pipeline stage.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple

_NUMBERED = re.compile(r"^(.*?)\.?(\d+)(?:\.|$)")


class NamedModule(NamedTuple):
    """A module whose quantization method is asked to convert it."""

    key: Hashable
    name: str
    """Dotted, as in the model."""
    moe: bool = False
    weights: bool = True
    """Whether there are weights to convert: an attention's method only settles the scales of its KV cache."""


class LayerNumbers:
    """Layer numbers over all the models of a rank, and which of their conversions are still to come."""

    def __init__(self) -> None:
        self._next_stack = 0
        self._names: dict[Hashable, tuple[str, int | None]] = {}
        self._pending: Counter[int] = Counter()
        self._seen: set[Hashable] = set()

    def add_model(self, modules: Iterable[NamedModule]) -> tuple[list[int], list[int]]:
        """Number the converted modules of one model.

        Args:
            modules: in the model's own order.

        Returns:
            The numbers of its layers, and of those that hold experts, both ascending.
        """
        first: dict[str, int] = {}
        highest = self._next_stack - 1
        layers: set[int] = set()
        moe_layers: set[int] = set()
        for key, name, moe, weights in modules:
            match = _NUMBERED.match(name)
            if match is None:
                self._names[key] = (name, None)
                continue
            start = first.setdefault(match[1], highest + 1)
            layer = start + int(match[2])
            highest = max(highest, layer)
            self._names[key] = (name, layer)
            if weights:
                self._pending[layer] += 1
            else:
                self._seen.add(key)
            layers.add(layer)
            if moe:
                moe_layers.add(layer)
        self._next_stack = highest + 1
        return sorted(layers), sorted(moe_layers)

    def identify(self, key: Hashable) -> tuple[str | None, int | None]:
        """Name and layer number of a module; both missing for one that was never added."""
        return self._names.get(key, (None, None))

    def finished(self, key: Hashable) -> bool:
        """Note a conversion; true when it was the last first conversion of its layer's weights."""
        layer = self.identify(key)[1]
        if layer is None or key in self._seen:
            return False
        self._seen.add(key)
        self._pending[layer] -= 1
        return self._pending[layer] == 0
