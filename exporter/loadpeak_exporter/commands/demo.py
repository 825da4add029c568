"""``loadpeak demo``."""

import contextlib
import math
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import typer
from rich.console import Console

from loadpeak import run_folder, settings
from loadpeak.errors import CommandError
from loadpeak_exporter import fleet_demo, live, replay
from loadpeak_exporter.app import create_app
from loadpeak_exporter.commands.compare import to_json
from loadpeak_exporter.commands.serve import serve
from loadpeak_exporter.compare import compare
from loadpeak_exporter.fleet_demo import STORIES
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.server import Server, bind
from loadpeak_exporter.store import RunStore
from loadpeak_exporter.text import print_comparison, print_summary

RECORDED = Path(__file__).parent.parent / "recorded"
"""Two startups of stock vLLM, recorded by loadpeak; ``recorded/README.md`` says how."""
VARIANTS = ("baseline", "moe-layer")
RECORDED_ON = (
    "recorded on one H200 with the allocator capped at 32 GiB, which stands in for a smaller card: "
    "the baseline meets that limit at 32,754 MiB reserved"
)


def demo(
    once: bool = typer.Option(False, "--once", help="Stop after the comparison instead of serving on."),
    speed: float = typer.Option(
        2.0, min=0.1, max=1000, help="How many times faster than it was; above 200 short peaks are missed."
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print the comparison as JSON on standard output, and nothing else there."
    ),
    story: str = typer.Option(
        "",
        help="Instead play a made-up host of a fleet without end, behind `loadpeak serve`: "
        + ", ".join(STORIES)
        + ".",
    ),
) -> None:
    """Replay two recorded startups of vLLM, as it is and with the cache release, and compare them.

    The recorder, the sampler and the exporter run as in an engine; only the readings are recorded ones.
    """
    if story:
        _play_host(story, speed)
        return
    console = Console(stderr=True) if as_json else Console()
    found = settings.load()
    if found.problems:
        raise found.problems[0]
    try:
        listening = bind(found.host, found.port or 9838)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {found.host} ({error.strerror}); set LOADPEAK_HOST to an address of this host"
        ) from error
    home = Path(tempfile.mkdtemp(prefix="loadpeak-demo-"))
    store = RunStore(home)
    server = Server(create_app(lambda: store.exported(math.inf, len(VARIANTS)), found.layers), listening)
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    url = f"http://{found.host}:{server.port}/metrics"
    try:
        console.print(f"metrics at {url}", highlight=False)
        console.print(RECORDED_ON, highlight=False)
        records = [_replay(console, store, variant, home, speed) for variant in VARIANTS]
        comparison = compare(*records)
        print_comparison(console, comparison)
        if as_json:
            print(to_json(comparison), flush=True)
        if not once:
            console.print(f"still serving {url}; Ctrl-C ends it", highlight=False)
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def _play_host(story: str, speed: float) -> None:
    """One host of a made-up fleet; its run store is the configured one."""
    if story not in STORIES:
        raise CommandError(f"there is no story {story!r}; there are {', '.join(STORIES)}")
    home = settings.load().home
    arguments = (RECORDED, home, story, speed)
    threading.Thread(target=fleet_demo.play, args=arguments, name="fleet-demo", daemon=True).start()
    serve("", "")


def _replay(console: Console, store: RunStore, variant: str, home: Path, speed: float) -> RunRecord:
    """Replay one recorded startup under the live view, and print its summary."""
    run = run_folder.new_run_id(time.time(), variant)
    threads = replay.start(RECORDED / variant, home, run, speed)
    live.watch(console, lambda: _record(store, run), lambda: not any(t.is_alive() for t in threads))
    record = store.find(run)
    print_summary(console, record)
    return record


def _record(store: RunStore, run: str) -> RunRecord | None:
    record = store.reader(run).read()
    return record if isinstance(record, RunRecord) else None
