"""The host service with many runs: a scrape, the list, and how soon the page shows what happened.

    python -m benchmarks.host [--no-page]

A real ``loadpeak serve`` over HTTP. One run of 8 ranks and 96 layers loads, a layer of every rank between two
scrapes; 50 runs have ended and are kept: smaller ones, then some of the same size. Then 10,000 runs of one
rank and 48 layers are listed. At last Chromium shows the page of a run while it loads: the time from the line
on disk to the text on the screen.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
from tests.conftest import free_port
from tests.exporter.building import Startup, copies

RANKS, LAYERS, FINISHED, MANY, EVENTS = 8, 96, 50, 10_000, 20


@contextmanager
def serving(home: Path, **settings: str) -> Iterator[tuple[str, psutil.Process]]:
    """The service over a run store: its address and its process."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "loadpeak"), "serve", "--port", str(port)]
    environ = {**os.environ, "LOADPEAK_HOME": str(home), **settings}
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, env=environ, stdout=nothing, stderr=nothing) as process:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url + "/healthz"):
            time.sleep(0.05)
        try:
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except OSError:
        return False
    return True


def get(url: str) -> tuple[float, int]:
    """Milliseconds until the whole answer was there, and its size in bytes."""
    begun = time.perf_counter()
    with urllib.request.urlopen(url, timeout=300) as response:
        size = len(response.read())
    return (time.perf_counter() - begun) * 1000, size


def scrapes(home: Path, finished_ranks: int, finished_layers: int) -> None:
    """``/metrics`` while a run loads and 50 have ended, and with nothing new."""
    for number in range(finished_ranks):
        finished = Startup(home, "finished-0", rank=number, wall=time.time()).load(finished_layers).ready()
    copies(finished.folder, FINISHED - 1)
    ranks = [Startup(home, "live", rank=rank, pid=os.getpid()) for rank in range(RANKS)]
    for rank in ranks:
        rank.session.start_phase("process_weights")
        rank.session.model(range(LAYERS), range(LAYERS), LAYERS)
    with serving(home, LOADPEAK_SERVE_RUNS="100", LOADPEAK_SERVE_KEEP_HOURS="8760") as (url, process):
        first, _ = get(url + "/metrics")
        live: list[float] = []
        size = 0
        for layer in range(LAYERS):
            for rank in ranks:
                rank.convert(layer)
            milliseconds, size = get(url + "/metrics")
            live.append(milliseconds)
        quiet = [get(url + "/metrics")[0] for _ in range(50)]
        memory = process.memory_info().rss
    print(f"| **{FINISHED} runs of {finished_ranks} × {finished_layers} have ended** | | |")
    line("scrape, the first", [first])
    line("scrape while one run loads, last 20 layers", live[-20:])
    line("scrape with nothing new", quiet)
    print(f"| ({size / 1e6:.1f} MB of text; the service uses {memory >> 20} MiB) | | |")


def listing(home: Path) -> None:
    """The list of 10,000 runs."""
    source = Startup(home, "many-0").load(48).ready()
    copies(source.folder, MANY - 1, old=True)
    with serving(home) as (url, process):
        first = [get(f"{url}/api/runs?limit=200&offset={offset}")[0] for offset in range(0, MANY, 200)]
        again = [get(f"{url}/api/runs?limit=200&offset={offset}")[0] for offset in range(0, MANY, 200)]
        metrics = [get(url + "/metrics")[0] for _ in range(20)]
        memory = process.memory_info().rss
    line("page of 200 runs of 10,000, read for the first time", first)
    line("page of 200 runs of 10,000, again", again)
    line("all 10,000 runs, again", [sum(again)])
    line("scrape with 10,000 runs that ended long ago", metrics[1:])
    print(f"| (the service uses {memory >> 20} MiB) | | |")


def page(home: Path) -> None:
    """From the line on disk to the text on the screen."""
    from tests.exporter.conftest import chromium
    from tests.exporter.test_page import Page

    startup = Startup(home, "shown", pid=os.getpid())
    startup.session.start_phase("process_weights")
    startup.session.model(range(LAYERS), range(LAYERS), LAYERS)
    startup.convert(0)
    with serving(home) as (url, _), chromium(home / "chromium") as browser:
        shown = Page(browser, url + "/")
        shown.open("#/run/shown").says(f"1 of {LAYERS}")
        shown.curves("time")
        delays: list[float] = []
        for layer in range(1, EVENTS + 1):
            time.sleep(0.37)
            begun = time.perf_counter()
            startup.convert(layer)
            shown.says(f"{layer + 1} of {LAYERS}", every=0.01)
            delays.append((time.perf_counter() - begun) * 1000)
    line("page shows a layer after", delays)


def line(what: str, milliseconds: list[float]) -> None:
    """A row of the table."""
    print(f"| {what} | {statistics.median(milliseconds):,.1f} | {max(milliseconds):,.1f} |", flush=True)


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-page", action="store_true", help="without Chromium")
    arguments = parser.parse_args()
    print("| what | median ms | highest ms |\n|---|---|---|")
    parts = [partial(scrapes, finished_ranks=1, finished_layers=48)]
    parts += [partial(scrapes, finished_ranks=RANKS, finished_layers=LAYERS), partial(listing)]
    parts += [partial(page)] * (not arguments.no_page)
    for part in parts:
        with tempfile.TemporaryDirectory() as home:
            part(Path(home))


if __name__ == "__main__":
    main()
