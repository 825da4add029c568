"""The exporter inside the engine: the app over the engine's own run, in a thread of local rank 0.

It reads the run's folder like any other reader, so all ranks of the host are there. After ``ready`` the
files do not change any more and the text is kept.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from loadpeak.record import Exporter

if TYPE_CHECKING:
    from pathlib import Path

    from loadpeak.recording import Recording


def attach(recording: Recording) -> None:
    """Start the exporter if this worker speaks for its host; importing and binding is the thread's work."""
    folder, port = recording.folder, recording.settings.port
    if folder is None or port is None or not recording.worker.first_on_host:
        return
    arguments = ("exporter", _serve, recording, folder, port)
    threading.Thread(
        target=recording.guard.call, args=arguments, name="loadpeak-exporter", daemon=True
    ).start()


def _serve(recording: Recording, folder: Path, port: int) -> None:
    from loadpeak_exporter.app import create_app
    from loadpeak_exporter.host import Host
    from loadpeak_exporter.records import RunRecord
    from loadpeak_exporter.server import Server, bind
    from loadpeak_exporter.store import RunReader

    reader = RunReader(folder, Host.this())

    def runs() -> list[RunRecord]:
        record = reader.read()
        return [record] if isinstance(record, RunRecord) else []

    host = recording.settings.host
    server = Server(create_app(runs, recording.settings.layers), bind(host, port))
    recording.write(Exporter(at_seconds=time.monotonic(), host=host, port=server.port))
    server.run()
