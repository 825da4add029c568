"""The settings table: every environment variable that loadpeak reads, in one place.

The variables come first because a vLLM worker can only be reached through its environment; the
command line options of ``loadpeak run`` set the same names. Docs and tests read :data:`TABLE`.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadpeak.errors import SettingError

Parse = Callable[[str], Any]
"""A setting's value from its text; raises ValueError (or KeyError) for one that cannot be used."""


class Setting(NamedTuple):
    """One row: name with its unit, default as text, what is accepted, and what it does."""

    name: str
    field: str
    default: str
    expected: str
    help: str
    parse: Parse


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this process, parsed. Fields are described in :data:`TABLE`."""

    disabled: bool
    home: Path
    run_id: str | None
    variant: str
    experiment: str | None
    sample_interval_seconds: float
    cache_release: str
    split_limit: str
    port: int | None
    host: str
    layers: str
    memory_history: int | None
    evidence: bool
    outputs: Path | None
    problems: tuple[SettingError, ...] = ()
    """Values that could not be used; their defaults stand in."""


HOME_DEFAULT = "$XDG_STATE_HOME/loadpeak or ~/.local/state/loadpeak"


def _home(text: str) -> Path:
    if text != HOME_DEFAULT:
        return Path(text).expanduser()
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "loadpeak").expanduser()
    except RuntimeError:
        # A user id that the system does not know, as containers have it.
        return Path(tempfile.gettempdir(), f"loadpeak-{os.getuid()}")


def _flag(text: str) -> bool:
    return {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}[
        text.strip().lower()
    ]


NAME = "a name of at most 200 bytes in UTF-8, without slashes"


def _name(text: str) -> str:
    # A file name has at most 255 bytes; what is no UTF-8 in the environment does not encode.
    if not 0 < len(text.encode()) <= 200 or any(c in "/\\\n\0" for c in text) or text.startswith("."):
        raise ValueError
    return text


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.001 <= seconds <= 10:
        raise ValueError
    return seconds


def port_or_off(text: str) -> int | None:
    """A port number, or nothing for ``off``.

    Raises:
        ValueError: it is neither.
    """
    if text.lower() == "off":
        return None
    port = int(text)
    if not 1 <= port <= 65535:
        raise ValueError
    return port


def _entries_or_off(text: str) -> int | None:
    if text.lower() == "off":
        return None
    entries = int(text)
    if not 1000 <= entries <= 10_000_000:
        raise ValueError
    return entries


def _optional_path(text: str) -> Path | None:
    return Path(text) if text else None


def _one_of(*choices: str) -> Parse:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


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


def parse_size(text: str) -> int:
    """Bytes from a size such as ``2GiB``, ``1.5 GiB``, ``512MiB``, ``2GB`` or ``4096``.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size")
    return int(float(match[1]) * _UNITS[match[2]])


def release_policy(text: str) -> str:
    """The spelling of a release policy, as it is.

    Raises:
        ValueError: there is no such policy.
    """
    name, _, size = text.partition(":")
    if name == "threshold":
        parse_size(size)
    elif text not in ("off", "moe-layer", "layer"):
        raise ValueError
    return text


def _optional_name(text: str) -> str | None:
    return _name(text) if text else None


TABLE: tuple[Setting, ...] = (
    Setting("LOADPEAK_DISABLE", "disabled", "0", "0 or 1", "Installs no hook in vLLM when set to 1.", _flag),
    Setting(
        "LOADPEAK_HOME",
        "home",
        HOME_DEFAULT,
        "a folder",
        "Where the records of runs are kept, in the folder `runs`.",
        _home,
    ),
    Setting(
        "LOADPEAK_RUN_ID",
        "run_id",
        "",
        NAME,
        "Names the run of the next engine that starts; a time and the engine's id when empty.",
        _optional_name,
    ),
    Setting(
        "LOADPEAK_VARIANT",
        "variant",
        "baseline",
        NAME,
        "What is tried in this run, for example `baseline` or `moe-layer`; a label of every series.",
        _name,
    ),
    Setting(
        "LOADPEAK_EXPERIMENT",
        "experiment",
        "",
        NAME,
        "Groups runs that belong together.",
        _optional_name,
    ),
    Setting(
        "LOADPEAK_SAMPLE_INTERVAL_SECONDS",
        "sample_interval_seconds",
        "0.01",
        "a number of seconds from 0.001 to 10",
        "Time between two readings of the device.",
        _interval,
    ),
    Setting(
        "LOADPEAK_CACHE_RELEASE",
        "cache_release",
        "off",
        "one of the policies off, moe-layer, layer, threshold:SIZE (for example threshold:2GiB)",
        "When unused cached blocks are given back to the device while loading.",
        release_policy,
    ),
    Setting(
        "LOADPEAK_SPLIT_LIMIT",
        "split_limit",
        "vllm",
        "vllm (what vLLM does) or keep (the allocator's own limit stays)",
        "`keep` leaves the allocator's own split limit in force while vLLM loads.",
        _one_of("vllm", "keep"),
    ),
    Setting(
        "LOADPEAK_PORT",
        "port",
        "9838",
        "a port number, or off",
        "Port of the exporter inside the engine; the next free one is taken when it is in use.",
        port_or_off,
    ),
    Setting(
        "LOADPEAK_HOST",
        "host",
        "127.0.0.1",
        "an address to listen on",
        "Address of the exporter inside the engine.",
        str,
    ),
    Setting(
        "LOADPEAK_LAYERS",
        "layers",
        "all",
        "all, moe or off",
        "Which layers have series of their own on `/metrics`.",
        _one_of("all", "moe", "off"),
    ),
    Setting(
        "LOADPEAK_MEMORY_HISTORY",
        "memory_history",
        "off",
        "off, or a number of events from 1000 to 10000000",
        "Records the allocator's history while loading, the newest so many events, for `loadpeak whatif`.",
        _entries_or_off,
    ),
    Setting(
        "LOADPEAK_EVIDENCE",
        "evidence",
        "off",
        "on or off",
        "Records settings and a hash of every prepared weight once the engine is ready; for `loadpeak ab`.",
        lambda text: {"on": True, "off": False}[text.lower()],
    ),
    Setting(
        "LOADPEAK_OUTPUTS",
        "outputs",
        "",
        "a file",
        "Appends what `vllm.LLM` generates in a script to this file, as JSON Lines; for `loadpeak ab`.",
        _optional_path,
    ),
)


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings in an environment; a bad value becomes a problem and its default is used."""
    values, problems = read(TABLE, environ)
    return Settings(**values, problems=tuple(problems))


def read(table: Iterable[Setting], environ: Mapping[str, str]) -> tuple[dict[str, Any], list[SettingError]]:
    """Values by field, and what could not be used; its default stands in."""
    values: dict[str, Any] = {}
    problems: list[SettingError] = []
    for setting in table:
        text = environ.get(setting.name) or setting.default
        try:
            values[setting.field] = setting.parse(text)
        except (ValueError, KeyError, RuntimeError):
            # RuntimeError: a home folder that cannot be found.
            problems.append(SettingError(setting.name, text, setting.expected))
            values[setting.field] = setting.parse(setting.default)
    return values, problems
