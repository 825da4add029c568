"""Take out of a report what tells about hosts and people: host names, addresses, user names, paths.

A path keeps its last part, so that a model is still recognized; another path with the same last part gets a
number, so that what differed still does. Names are first collected from the whole
report (a user from the home folders in it), then taken out everywhere, also where they stand alone.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

HOST, ADDRESS, USER = "HOST", "ADDRESS", "USER"
"""What stands in the place of what was taken out."""
_TELLS_NOTHING = {
    "",
    "root",
    "user",
    "users",
    "vllm",
    "ubuntu",
    "nobody",
    "localhost",
    "loadpeak",
    "baseline",
}
"""Names that tell nothing about anybody, and that reports need."""
_KEPT = {"rule", "outcome", "phase", "kind"}
"""Fields with words of our own."""
_DROPPED = {"boot_id", "pid_namespace"}
"""Fields that tell one host from another and say nothing else."""
_HOME = re.compile(r"/(?:home|homes|users|user)/([^/\s'\",:;]+)|~([\w.-]+)/", re.IGNORECASE)
_URL = r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>|)\]}]+"
_IN_PATH = r"[^\s'\"`,;:()<>\[\]{}|]"
_PATH = rf"(?<![\w/.~%-])(?:~[\w.-]*|\.{{1,2}})?/{_IN_PATH}*(?!\.){_IN_PATH}"
_NUMBERS = re.compile(r"(?<![\w.:])[0-9A-Fa-f]*[.:][0-9A-Fa-f.:]+(?<![.:])(?![\w:])")
_INSIDE = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|corp|intra|intranet)\b", re.IGNORECASE)


def redact(report: T, hosts: Iterable[str], paths: Iterable[str]) -> T:
    """The same report without them.

    Args:
        report: any structure of frozen structs, tuples, lists and dicts.
        hosts: host names, as far as they are known.
        paths: whole arguments and settings that may be paths with spaces in them.
    """
    users = {
        name for text in _texts(report) for match in _HOME.finditer(text) for name in match.groups() if name
    }
    users |= {Path.home().name, _login()}
    names = {socket.gethostname(), *hosts}
    names |= {name.partition(".")[0] for name in names if not _address(name)}
    odd = [path for path in paths if path.startswith(("/", "~")) and not re.fullmatch(_PATH, path)]
    places: dict[str, list[str]] = {}

    def place(found: str) -> str:
        found = found.rstrip("/")
        short = _place(found)
        longs = places.setdefault(short, [])
        if found not in longs:
            longs.append(found)
        number = longs.index(found) + 1
        return short if number == 1 else f"{short} ({number})"

    steps: list[tuple[re.Pattern[str], Callable[[str], str]]] = [
        (_any(odd, rf"(?:/{_IN_PATH}*)?"), _last),
        (re.compile(f"{_URL}|{_PATH}"), place),
        # A host's name may go on with its domain.
        (_any(names - _TELLS_NOTHING, r"(?:\.[\w-]+)*(?!\w)"), lambda _: HOST),
        (_any(users - _TELLS_NOTHING, r"(?!\w)"), lambda _: USER),
        (_INSIDE, lambda _: HOST),
        (_NUMBERS, lambda found: ADDRESS if _address(found) else found),
    ]

    def clean(text: str) -> str:
        for pattern, put in steps:
            text = pattern.sub(lambda match, put=put: put(match[0]), text)  # type: ignore[misc]
        return text

    redacted: T = _walk(report, clean)
    return redacted


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _any(names: Iterable[str], then: str) -> re.Pattern[str]:
    """One of these texts, longer ones first, not in the middle of a word, with what may follow it."""
    texts = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{texts}){then}" if texts else "(?!)")


def _last(path: str) -> str:
    """The last part of a path; of a home folder nothing but that it is one."""
    path = path.rstrip("/")
    if _HOME.fullmatch(path) or _HOME.fullmatch(path + "/"):
        return "~"
    return path.rpartition("/")[2] or "/"


def _place(found: str) -> str:
    """A path, or an address: that keeps its scheme, and the last part of its path if it has one."""
    scheme, mark, rest = found.partition("://")
    if not mark:
        return _last(found)
    last = rest.partition("?")[0].partition("/")[2].rstrip("/").rpartition("/")[2]
    return f"{scheme}://{HOST}" + (f"/{last}" if last else "")


def _address(text: str) -> bool:
    """Whether a text is an IP address, with or without a port, that leads to another host or names one."""
    for candidate in (text, text.rpartition(":")[0]):
        try:
            found = ipaddress.ip_address(candidate)
        except ValueError:
            continue
        return not (found.is_loopback or found.is_unspecified)
    return False


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _texts(getattr(value, name))
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _texts(item)


def _walk(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, msgspec.Struct):
        fields = {
            name: None if name in _DROPPED else _walk(getattr(value, name), clean)
            for name in value.__struct_fields__
            if name not in _KEPT
        }
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {_walk(key, clean): _walk(item, clean) for key, item in value.items()}
    if isinstance(value, tuple):
        # A point of a timeline is a plain tuple; a named one is built from its fields.
        items = [_walk(item, clean) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return [_walk(item, clean) for item in value] if isinstance(value, list) else value
