"""Predict startup peaks from two recorded histories, then measure each in a process of its own, on a GPU.

    python -m benchmarks.whatif_gpu [--config CONFIG_JSON] [--home FOLDER] [--jobs 3]

Workload A is a start of vLLM with dummy weights (``benchmarks.startup``), workload B the allocations of the
SM70 AWQ loader (``benchmarks.awq_lifecycle``). Each is recorded once with loadpeak's own history, under
expandable segments and vLLM's split limit; everything else is predicted from that. Several starts run at a
time: what is compared is what each allocator had reserved, under a cap of its own. Prints one table in MiB.

Needs loadpeak installed beside vLLM, so that its plugin is found. Without ``--config`` only B is run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_startups import recorded
from loadpeak.snapshot import read
from loadpeak.whatif import questions
from loadpeak.whatif.questions import Answer, Question
from loadpeak.whatif.source import build

MIB, GIB = 1 << 20, 1 << 30
EXPANDABLE, LIMIT = "expandable_segments:True", "max_split_size_mb:20"
HISTORY = 2_000_000
CAPS_GIB = {"A": (32, 24), "B": (32, 8)}
"""The second of each makes the recorded settings run into it."""


class Combination(NamedTuple):
    """One start to predict and to measure."""

    workload: str
    expandable: bool
    split_limit: bool
    release: str
    cap_gib: int

    @property
    def name(self) -> str:
        """A run id."""
        parts = ["expandable" if self.expandable else "default", "limit" if self.split_limit else "free"]
        return "-".join([self.workload, *parts, self.release, f"{self.cap_gib}gib"])

    @property
    def conf(self) -> str:
        """What the process is started with; B has the split limit from the start, vLLM sets its own."""
        parts = [EXPANDABLE] * self.expandable + [LIMIT] * (self.split_limit and self.workload == "B")
        return ",".join(parts)

    @property
    def question(self) -> Question:
        """The same, asked of the recorded history."""
        keep = self.workload == "A" and not self.split_limit
        return Question(self.conf, self.release, self.cap_gib * GIB, keep)


def combinations(workload: str) -> list[Combination]:
    """All of them under the first capacity, and the recorded settings under the second."""
    first, second = CAPS_GIB[workload]
    every = [
        Combination(workload, expandable, split_limit, release, first)
        for expandable, split_limit, release in itertools.product(
            (True, False), (True, False), ("off", "moe-layer")
        )
    ]
    return [*every, Combination(workload, True, True, "off", second)]


def start(one: Combination, arguments: argparse.Namespace, run: str, history: int | None = None) -> Path:
    """One start in a fresh process; returns the run's folder."""
    folder: Path = arguments.home / "runs" / run
    environ = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": one.conf,
        "LOADPEAK_HOME": str(arguments.home),
        "LOADPEAK_RUN_ID": run,
        "LOADPEAK_PORT": "off",
        "LOADPEAK_CACHE_RELEASE": one.release,
        "LOADPEAK_SPLIT_LIMIT": "vllm" if one.split_limit else "keep",
        "LOADPEAK_MEMORY_HISTORY": str(history or "off"),
    }
    if one.workload == "A":
        command = [sys.executable, "-m", "benchmarks.startup", str(arguments.config)]
        command += ["--option", "gpu_memory_utilization=0.2"]
    else:
        command = [sys.executable, "-m", "benchmarks.awq_lifecycle", str(folder), "--release", one.release]
        command += ["--history", str(history)] if history else []
    done = subprocess.run(
        [*command, "--cap-gib", str(one.cap_gib)], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{run} failed:\n{done.stdout[-800:]}\n{done.stderr[-1500:]}", file=sys.stderr)
    return folder


def predict(folder: Path, asked: list[Combination]) -> list[Answer]:
    """What the recorded history says about each."""
    path = folder / "history-0.pickle.gz"
    source = build(read(path, 4 * GIB), path)
    history = source.devices[0].history
    print(
        f"{folder.name}: {len(history.times_us):,} events, layers from {source.layers_from}, settings from "
        f"{source.timeline_from}, recorded peak {history.recorded_peak_bytes / MIB:,.0f} MiB"
    )
    return questions.ask(source, [one.question for one in asked])


def row(one: Combination, answer: Answer, found: dict[str, Any]) -> str:
    """A line of the table."""
    predicted, measured = answer.outcome.peak_reserved_bytes, found["reserved"]
    off = abs(predicted - measured) / measured if measured else float("nan")
    cells = [
        one.workload,
        EXPANDABLE if one.expandable else "default",
        "20 MiB" if one.split_limit else "none",
        one.release,
        f"{one.cap_gib} GiB",
        f"{predicted / MIB:,.0f}",
        f"{measured / MIB:,.0f}",
        f"{off:.2%}",
        f"{answer.outcome.retries} / {found['retries']}",
        f"{'yes' if answer.fits else 'no'} / {'no' if found['ready'] is None else 'yes'}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Record, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="config.json of the model of workload A")
    parser.add_argument("--home", type=Path, default=Path("/tmp/loadpeak-whatif"))
    parser.add_argument("--jobs", type=int, default=3, help="starts at a time")
    arguments = parser.parse_args()
    workloads = ["A", "B"] if arguments.config else ["B"]
    if "A" in workloads and not any(e.name == "loadpeak" for e in entry_points(group="vllm.general_plugins")):
        sys.exit("loadpeak is not installed here: vLLM does not find its plugin")
    begun = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {what}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        recordings = [
            pool.submit(start, combinations(workload)[0], arguments, f"{workload}-recorded", HISTORY)
            for workload in workloads
        ]
        folders = dict(zip(workloads, (future.result() for future in recordings), strict=True))
        say("recorded")
        asked = {workload: combinations(workload) for workload in workloads}
        predicted = {workload: predict(folders[workload], asked[workload]) for workload in workloads}
        say("predicted")
        all_ = [one for workload in workloads for one in asked[workload]]
        list(pool.map(lambda one: start(one, arguments, one.name), all_))
    say("measured")
    columns = ["workload", "allocator setting", "split limit", "release", "capacity", "predicted", "measured"]
    columns += ["difference", "retries", "fits"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for workload in workloads:
        for one, answer in zip(asked[workload], predicted[workload], strict=True):
            print(row(one, answer, recorded(arguments.home, one.name)))


if __name__ == "__main__":
    main()
