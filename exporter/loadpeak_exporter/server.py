"""Serve the app from a thread of a process that has other things to do."""

from __future__ import annotations

import errno
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

PORTS_TRIED = 50


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on a port.

    Raises:
        OSError: the port is in use, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the port, or on the next free one.

    Raises:
        OSError: none of the next 50 ports is free, or the address is not ours.
    """
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        try:
            return listen(host, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"ports {port} to {port + PORTS_TRIED - 1} of {host} are all in use")


class Server:
    """uvicorn on a socket of ours, without signal handlers and without touching the logging set-up."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        import uvicorn

        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", loop="asyncio", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until stopped, in this thread."""
        import asyncio

        asyncio.run(self._server.serve(sockets=[self._listener]))

    def start(self) -> None:
        """Serve from a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="loadpeak-exporter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread that :meth:`start` began."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5)
        self._listener.close()
