"""Settings of the host service; the run store's place is a setting of the recorder's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loadpeak import settings
from loadpeak.errors import CommandError
from loadpeak.settings import Setting


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed; fields are described in :data:`TABLE`."""

    host: str
    port: int
    token: str | None
    user: str | None
    password: str | None
    certificate: Path | None
    key: Path | None
    keep_hours: float
    runs: int
    layers: int


def _secret(text: str) -> str | None:
    """A secret, or the content of the file that ``@FILE`` names: a file is not seen in a process list."""
    if not text.startswith("@"):
        return text or None
    try:
        content = Path(text[1:]).expanduser().read_text().strip()
    except OSError as error:
        raise ValueError from error
    if not content:
        raise ValueError
    return content


def _file(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError
    return path


def _port(text: str) -> int:
    port = settings.port_or_off(text)
    if port is None:
        raise ValueError
    return port


def _between(low: float, high: float) -> settings.Parse:
    def parse(text: str) -> float:
        number = float(text)
        if not low <= number <= high:
            raise ValueError
        return number

    return parse


TABLE: tuple[Setting, ...] = (
    Setting(
        "LOADPEAK_SERVE_HOST",
        "host",
        "127.0.0.1",
        "an address to listen on",
        "Address of the host service.",
        str,
    ),
    Setting("LOADPEAK_SERVE_PORT", "port", "9839", "a port number", "Port of the host service.", _port),
    Setting(
        "LOADPEAK_SERVE_TOKEN",
        "token",
        "",
        "a token, or @FILE",
        "Bearer token that every request but `/healthz` has to carry.",
        _secret,
    ),
    Setting("LOADPEAK_SERVE_USER", "user", "", "a name", "User name for basic authentication.", _secret),
    Setting(
        "LOADPEAK_SERVE_PASSWORD",
        "password",
        "",
        "a password, or @FILE",
        "Password for basic authentication.",
        _secret,
    ),
    Setting(
        "LOADPEAK_SERVE_CERTIFICATE",
        "certificate",
        "",
        "a file that exists",
        "Certificate chain in PEM; with it the service speaks TLS.",
        _file,
    ),
    Setting("LOADPEAK_SERVE_KEY", "key", "", "a file that exists", "Private key of the certificate.", _file),
    Setting(
        "LOADPEAK_SERVE_KEEP_HOURS",
        "keep_hours",
        "24",
        "a number of hours from 0 to 8760",
        "How long runs that have ended stay on `/metrics`; the page and the API show all.",
        _between(0, 8760),
    ),
    Setting(
        "LOADPEAK_SERVE_RUNS",
        "runs",
        "20",
        "a number from 1 to 1000",
        "How many runs are on `/metrics` at most: live ones first, then the newest.",
        lambda text: int(_between(1, 1000)(text)),
    ),
    Setting(
        "LOADPEAK_SERVE_LAYERS",
        "layers",
        "128",
        "a number from 0 to 10000",
        "How many layers of a rank have series of their own at most: the first ones.",
        lambda text: int(_between(0, 10000)(text)),
    ),
)


def load(environ: Mapping[str, str] = os.environ, **options: str) -> ServeSettings:
    """The settings of the host service.

    Args:
        environ: the environment.
        options: values that go before it, by field; empty ones do not count.

    Raises:
        SettingError: a value cannot be used.
        CommandError: values do not go together.
    """
    names = {setting.field: setting.name for setting in TABLE}
    chosen = {names[field]: text for field, text in options.items() if text}
    values, problems = settings.read(TABLE, {**environ, **chosen})
    if problems:
        raise problems[0]
    found = ServeSettings(**values)
    if (found.user is None) != (found.password is None):
        raise CommandError("basic authentication needs both LOADPEAK_SERVE_USER and LOADPEAK_SERVE_PASSWORD")
    if (found.certificate is None) != (found.key is None):
        raise CommandError("TLS needs both LOADPEAK_SERVE_CERTIFICATE and LOADPEAK_SERVE_KEY")
    return found
