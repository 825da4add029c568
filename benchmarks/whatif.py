"""How long a what-if takes: a snapshot read and replayed once on one core, then eight settings on all cores.

    python -m benchmarks.whatif SNAPSHOT [--repeat 5]

Each figure is from a fresh process. Memory is the highest resident size of the process that reads, and of
the largest of those that it forks, which share most of theirs with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from loadpeak.snapshot import read
from loadpeak.whatif import questions
from loadpeak.whatif.source import build

CONFS = (
    "expandable_segments:True",
    "",
    "max_split_size_mb:20",
    "expandable_segments:True,max_split_size_mb:20",
)
RELEASES = ("off", "moe-layer")


def once(path: Path) -> dict[str, Any]:
    """Read, and replay under the recorded settings, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    begun = time.perf_counter()
    source = build(read(path), path)
    was_read = time.perf_counter()
    questions.ask(source, [questions.recorded(source, None)])
    done = time.perf_counter()
    events = sum(len(run.history.times_us) for run in source.devices)
    return {"events": events, "read": was_read - begun, "replay": done - was_read, "seconds": done - begun}


def eight(path: Path) -> dict[str, Any]:
    """Read, and replay under eight settings, on all cores."""
    begun = time.perf_counter()
    source = build(read(path), path)
    asked = questions.combinations(source, CONFS, RELEASES, [], [None])
    questions.ask(source, asked)
    return {"seconds": time.perf_counter() - begun, "settings": len(asked)}


def measure(path: Path, what: str, repeat: int) -> dict[str, Any]:
    """The median of so many fresh processes."""
    runs = []
    for _ in range(repeat):
        command = [sys.executable, "-m", "benchmarks.whatif", str(path), "--only", what]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    """Both, with the memory they take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=("once", "eight"), help="measure in this process, print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        result = {"once": once, "eight": eight}[arguments.only](arguments.snapshot)
        for name, who in (("own_mib", resource.RUSAGE_SELF), ("forked_mib", resource.RUSAGE_CHILDREN)):
            result[name] = resource.getrusage(who).ru_maxrss / 1024
        print(json.dumps(result))
        return
    one = measure(arguments.snapshot, "once", arguments.repeat)
    print(f"{arguments.snapshot.name}: {one['events']:,.0f} events, Python {sys.version.split()[0]}")
    print(
        f"read and replayed once, one core: {one['seconds']:.2f} s "
        f"(read {one['read']:.2f}, replay {one['replay']:.2f}), {one['own_mib']:.0f} MiB"
    )
    all_ = measure(arguments.snapshot, "eight", arguments.repeat)
    print(
        f"{all_['settings']:.0f} settings on {len(os.sched_getaffinity(0))} cores: {all_['seconds']:.2f} s, "
        f"{all_['own_mib']:.0f} MiB, forked {all_['forked_mib']:.0f} MiB each"
    )


if __name__ == "__main__":
    main()
