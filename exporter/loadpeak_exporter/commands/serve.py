"""``loadpeak serve``."""

import platform
import ssl

import typer
import uvicorn

from loadpeak import settings
from loadpeak.errors import CommandError
from loadpeak_exporter import serve_settings
from loadpeak_exporter.host_app import create_host_app
from loadpeak_exporter.serve_settings import ServeSettings
from loadpeak_exporter.store import RunStore

GRACE_SECONDS = 3
"""Requests that are under way when the service ends may take so long."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    host: str = typer.Option("", help="Address to listen on (LOADPEAK_SERVE_HOST, default 127.0.0.1)."),
    port: str = typer.Option("", help="Port to listen on (LOADPEAK_SERVE_PORT, default 9839)."),
) -> None:
    """Serve every run of this host: metrics, a page, an API and service discovery.

    It only reads the run store. Access and TLS are settings, see docs/settings.md.
    """
    found = serve_settings.load(host=host, port=port)
    base = settings.load()
    if base.problems:
        raise base.problems[0]
    if base.home.exists() and not base.home.is_dir():
        raise CommandError(f"LOADPEAK_HOME={base.home} is no folder; name the one that engines record into")
    _check_port(found)
    _check_certificate(found)
    scheme = "https" if found.certificate else "http"
    name = platform.node() if found.host in ("0.0.0.0", "::") else found.host
    name = f"[{name}]" if ":" in name else name
    print(f"loadpeak serves {base.home} at {scheme}://{name}:{found.port}/", flush=True)
    if found.host not in LOOPBACK and found.token is None and found.password is None:
        print("loadpeak: anybody who reaches this port can read it; LOADPEAK_SERVE_TOKEN asks for a token")
    config = uvicorn.Config(
        create_host_app(RunStore(base.home), found, base.layers),
        host=found.host,
        port=found.port,
        ssl_certfile=found.certificate,
        ssl_keyfile=found.key,
        log_level="warning",
        ws="none",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    uvicorn.Server(config).run()


def _check_certificate(found: ServeSettings) -> None:
    """Say in one line that the certificate cannot be used.

    Raises:
        CommandError: it cannot, or its key does not belong to it.
    """
    if found.certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(found.certificate, found.key)
    except (ssl.SSLError, OSError) as error:
        raise CommandError(
            f"the certificate {found.certificate} and the key {found.key} cannot be used ({error}); "
            "expected PEM, and the key of that certificate"
        ) from None


def _check_port(found: ServeSettings) -> None:
    """Say in one line that the port cannot be had.

    Raises:
        CommandError: it cannot.
    """
    from loadpeak_exporter.server import listen

    try:
        listen(found.host, found.port).close()
    except OSError as error:
        raise CommandError(
            f"cannot listen on {found.host}:{found.port}: {error.strerror}; choose another with --port"
        ) from error
