"""Who may ask: a bearer token, basic authentication, or anybody on loopback."""

from __future__ import annotations

import base64
import binascii
import hmac
import http

from starlette.types import ASGIApp, Receive, Scope, Send

from loadpeak_exporter.app import error_response
from loadpeak_exporter.serve_settings import ServeSettings

OPEN = ("/healthz",)


class Access:
    """ASGI middleware that answers 401 to requests without the right token or password."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._accepted: list[bytes] = []
        if settings.token is not None:
            self._accepted.append(b"bearer " + settings.token.encode())
        if settings.user is not None and settings.password is not None:
            self._accepted.append(b"basic " + f"{settings.user}:{settings.password}".encode())
        self._challenge = 'Basic realm="loadpeak"' if settings.user is not None else "Bearer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or not self._accepted or scope["path"] in OPEN or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            http.HTTPStatus.UNAUTHORIZED,
            "a token or password is needed: LOADPEAK_SERVE_TOKEN, or LOADPEAK_SERVE_USER and its password",
            {"WWW-Authenticate": self._challenge},
        )
        await refusal(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"basic":
            try:
                credentials = base64.b64decode(credentials, validate=True)
            except binascii.Error:
                return False
        given = kind.lower() + b" " + credentials
        return any(hmac.compare_digest(given, accepted) for accepted in self._accepted)
