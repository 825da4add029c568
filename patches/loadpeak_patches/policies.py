"""When cached blocks are released: the policies and their spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from loadpeak.settings import parse_size
from loadpeak_patches.targets import is_target

if TYPE_CHECKING:
    from loadpeak.record import Memory
    from loadpeak.session import ConvertedModule


class Policy(NamedTuple):
    """One policy.

    Attributes:
        name: ``off``, ``moe-layer``, ``layer`` or ``threshold``.
        threshold_bytes: for ``threshold``, how much may stay cached.
    """

    name: str
    threshold_bytes: int = 0

    def wants(self, module: ConvertedModule, memory: Memory) -> bool:
        """Whether to release now, after this module was converted and with this reading."""
        if self.name == "moe-layer":
            return module.moe or is_target(module.method)
        if self.name == "threshold":
            if memory.reserved_bytes is None or memory.allocated_bytes is None:
                return False
            return memory.reserved_bytes - memory.allocated_bytes >= self.threshold_bytes
        return self.name == "layer"


def parse(text: str) -> Policy:
    """The policy that the setting ``LOADPEAK_CACHE_RELEASE`` spells; it has been checked there."""
    name, _, size = text.partition(":")
    return Policy(name, parse_size(size) if size else 0)
