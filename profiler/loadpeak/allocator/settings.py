"""The allocator's settings: what PyTorch reads from ``PYTORCH_ALLOC_CONF`` or is told at run time.

Rules from ``c10/core/AllocatorConfig.cpp`` (torch 2.9 and later; before that the same in
``c10/cuda/CUDAAllocatorConfig.cpp``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from loadpeak.allocator.sizes import LARGE_SEGMENT, MIB
from loadpeak.errors import SettingError

UNLIMITED = 1 << 62
"""A split limit that no block reaches."""
_INTERVALS = 16
"""Rounding has a step of its own for each power of two from 1 MiB to 32 GiB and above."""
_RESET_BY_SETTER = ("max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions")
"""What a call of PyTorch's setter puts back to its default unless the call names it (``parseArgs``)."""
_WITHOUT_EFFECT = re.compile(
    r"backend|release_lock_on_(cuda|hip)malloc|pinned_\w+|graph_capture_record_stream_reuse"
    r"|expandable_segments_\w+|throw_on_cudamalloc_oom"
)
"""Options of PyTorch that change nothing which is modelled here."""


class AllocatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One conf string, parsed. Sizes are bytes; fields are PyTorch's options of nearly the same name."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = LARGE_SEGMENT
    large_segment_bytes: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_divisions: tuple[int, ...] = ()
    """Divisions for sizes from 1 MiB, 2 MiB, 4 MiB, …; empty for no rounding."""

    def divisions(self, size: int) -> int:
        """Divisions between two powers of two for a size; 0 for none (``roundup_power2_divisions``)."""
        if not self.roundup_divisions:
            return 0
        return self.roundup_divisions[min(max(size.bit_length() - 21, 0), _INTERVALS - 1)]


def options(conf: str) -> dict[str, str]:
    """The options that a conf string names; the last of a name wins.

    Raises:
        SettingError: it is no list of ``name:value``.
    """
    found: dict[str, str] = {}
    text = "".join(conf.split()).strip(",")
    for item in re.split(r",(?![^\[]*\])", text) if text else []:
        name, colon, value = item.partition(":")
        if not name or not colon or not value:
            raise SettingError("alloc_conf", conf, "name:value,name:value as in PYTORCH_ALLOC_CONF")
        found[name] = value
    return found


def parse(conf: str) -> AllocatorSettings:
    """The settings that a conf string stands for; an empty one stands for the defaults.

    Raises:
        SettingError: an option is not PyTorch's, has a value PyTorch would not take, or is one whose
            effect cannot be predicted here.
    """
    values: dict[str, Any] = {}
    for name, value in options(conf).items():
        if name in _PARSERS:
            field, read, expected = _PARSERS[name]
            try:
                if "_" in value or not value.isascii():
                    raise ValueError  # Python reads such numbers, PyTorch does not.
                values[field] = read(value)
            except ValueError:
                raise SettingError(name, value, expected) from None
        elif name == "per_process_memory_fraction":
            raise SettingError(name, value, "a capacity in its place, for example --capacity 32GiB")
        elif name == "backend" and value != "native":
            raise SettingError(name, value, "native, the only allocator that is modelled")
        elif not _WITHOUT_EFFECT.fullmatch(name):
            raise SettingError("alloc_conf", name, "an option of PyTorch's native allocator")
    settings = AllocatorSettings(**values)
    if settings.max_split_bytes < settings.large_segment_bytes:
        least = settings.large_segment_bytes // MIB
        raise SettingError("max_split_size_mb", options(conf)["max_split_size_mb"], f"{least} or more")
    return settings


def added(conf: str, more: str) -> str:
    """A conf string with further options on top of it, as vLLM's scoped split limit adds its own."""
    return ",".join(f"{name}:{value}" for name, value in {**options(conf), **options(more)}.items())


def difference(before: str, after: str) -> str:
    """What a conf string adds to another; what it takes away is written as its default."""
    old, new = options(before), options(after)
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    for name in old.keys() - new.keys():
        if name in _DEFAULTS:
            changed[name] = _DEFAULTS[name]
    return ",".join(f"{name}:{value}" for name, value in changed.items())


def after_setter(conf: str, call: str) -> str:
    """The conf string in force after PyTorch's run-time setter was called with ``call``.

    The setter keeps what it is not told, but for three options (``AcceleratorAllocatorConfig::parseArgs``).
    """
    kept = {name: value for name, value in options(conf).items() if name not in _RESET_BY_SETTER}
    return added(",".join(f"{name}:{value}" for name, value in kept.items()), call)


def conf_string(settings: Mapping[str, Any]) -> str:
    """``allocator_settings`` of a PyTorch snapshot as a conf string; empty for the defaults.

    The text that the snapshot holds is only the last one that was set, so its other fields are read.
    """
    parts: list[str] = []
    if settings.get("expandable_segments"):
        parts.append("expandable_segments:True")
    split = settings.get("max_split_size")
    if isinstance(split, int) and 0 < split < UNLIMITED:
        parts.append(f"max_split_size_mb:{split // MIB}")
    threshold = settings.get("garbage_collection_threshold")
    if threshold:
        parts.append(f"garbage_collection_threshold:{threshold:g}")
    divisions = settings.get("roundup_power2_divisions") or {}
    parts += [f"roundup_power2_divisions:[{','.join(f'{k}:{v}' for k, v in divisions.items())}]"] * any(
        value not in (0, 1) for value in divisions.values()
    )
    return ",".join(parts)


# ── values ────────────────────────────────────────────────────────────────────────────────────────


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError
    return text == "True"


def _megabytes(text: str) -> int:
    size = int(text) * MIB
    if size <= 0:
        raise ValueError
    return min(size, UNLIMITED)


def _threshold(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value


def _power_of_two(text: str) -> int:
    value = int(text)
    if value < 0 or value & (value - 1):
        raise ValueError
    return value


def _divisions(text: str) -> tuple[int, ...]:
    """``4`` for all sizes, or ``[64:8,256:4,>:1]`` by size in MB (``parseRoundUpPower2Divisions``)."""
    if not text.startswith("["):
        return (_power_of_two(text),) * _INTERVALS
    steps = [0] * _INTERVALS
    last = -1
    if not re.fullmatch(r"\[[^\[\]]+\]", text):
        raise ValueError
    for item in text[1:-1].split(","):
        interval, _, value = item.partition(":")
        divisions = _power_of_two(value)
        if interval == ">":
            steps[last + 1 :] = [divisions] * (_INTERVALS - last - 1)
            continue
        place = min(max(_power_of_two(interval).bit_length() - 1, 0), _INTERVALS - 1)
        if last < 0:
            steps[:place] = [divisions] * place
        steps[place] = divisions
        last = place
    return tuple(steps)


_PARSERS = {
    "expandable_segments": ("expandable_segments", _flag, "True or False"),
    "max_split_size_mb": ("max_split_bytes", _megabytes, "a number of MiB, 20 or more"),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _megabytes, "a number of MiB"),
    "large_segment_size_mb": ("large_segment_bytes", _megabytes, "a number of MiB"),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold, "a number between 0 and 1"),
    "roundup_power2_divisions": ("roundup_divisions", _divisions, "a power of two, or [64:8,256:4,>:1]"),
}
_DEFAULTS = {
    "expandable_segments": "False",
    "max_split_size_mb": str(UNLIMITED // MIB),
    "max_non_split_rounding_mb": "20",
    "large_segment_size_mb": "20",
    "roundup_power2_divisions": "0",
}
