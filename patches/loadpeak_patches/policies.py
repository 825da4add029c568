"""When cached blocks are released: the policies and their spelling."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from loadpeak.errors import SettingError
from loadpeak_patches.targets import is_target

if TYPE_CHECKING:
    from loadpeak.record import Memory
    from loadpeak.session import ConvertedModule

SETTING = "LOADPEAK_CACHE_RELEASE"
EXPECTED = "one of the policies off, moe-layer, layer, threshold:SIZE (for example threshold:2GiB)"
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


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
    """A policy from its spelling.

    Raises:
        SettingError: there is no such policy; the error names those there are.
    """
    name, _, size = text.strip().partition(":")
    if name in ("off", "moe-layer", "layer") and not size:
        return Policy(name)
    if name == "threshold":
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?i?b?)", size.strip().lower())
        unit = _UNITS.get(match[2]) if match else None
        if match and unit:
            return Policy("threshold", int(float(match[1]) * unit))
    raise SettingError(SETTING, text, EXPECTED)
