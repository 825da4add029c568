"""Time of a scrape for a run of 8 ranks and 96 layers, while it loads and when it is finished.

    python -m benchmarks.scrape

While it loads every rank gets one more layer between two scrapes; the time holds reading what was
appended, building the records and rendering the text. Beside it: prometheus_client's own text of the
same registry.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from prometheus_client import generate_latest
from tests.exporter.building import Startup

from loadpeak_exporter.collector import registry
from loadpeak_exporter.exposition import Exposition
from loadpeak_exporter.host import Host
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.store import RunReader

RANKS, LAYERS = 8, 96


def main() -> None:
    """Both states, then the table."""
    with tempfile.TemporaryDirectory() as home:
        ranks = [Startup(Path(home), rank=rank, release="moe-layer") for rank in range(RANKS)]
        reader = RunReader(ranks[0].folder, Host(None, None, wall=lambda: 0.0))
        exposition = Exposition()

        def scrape() -> float:
            begun = time.perf_counter()
            record = reader.read()
            assert isinstance(record, RunRecord)
            exposition.render([record])
            return (time.perf_counter() - begun) * 1000

        for rank in ranks:
            rank.session.start_phase("process_weights")
            rank.session.model(range(LAYERS), range(LAYERS), LAYERS)
        live = []
        for layer in range(LAYERS):
            for rank in ranks:
                rank.convert(layer)
            live.append(scrape())
        for rank in ranks:
            rank.session.end_phase()
            rank.ready()
        scrape()
        finished = [scrape() for _ in range(200)]
        record = reader.read()
        assert isinstance(record, RunRecord)
        library = []
        for _ in range(10):
            begun = time.perf_counter()
            generate_latest(registry(lambda: [record]))
            library.append((time.perf_counter() - begun) * 1000)
        size = len(exposition.render([record]))
    print("| scrape of 8 ranks with 96 layers | median ms | highest ms |")
    print("|---|---|---|")
    print(f"| while it loads, last 20 layers | {statistics.median(live[-20:]):.2f} | {max(live[-20:]):.2f} |")
    print(f"| finished | {statistics.median(finished):.3f} | {max(finished):.3f} |")
    print(f"| prometheus_client's text, finished | {statistics.median(library):.1f} | {max(library):.1f} |")
    print(f"{size / 1000:.0f} kB of text")


if __name__ == "__main__":
    main()
