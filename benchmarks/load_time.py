"""Load time with the plugin against without, and vLLM's own profiling figures in both.

    python -m benchmarks.load_time CONFIG_JSON [--pairs 6]

Starts engines in one process, with and without recording in turn (with, without, without, with, …), so
that both arms see the same warm caches, and prints the median ratio, the noise floor (the same ratio
between the recordings-off starts themselves) and whether vLLM's memory profiling saw the same figures.
Starts are noisy, so the time that the worker's thread spends in loadpeak's hooks is summed up as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import startup
from loadpeak.guard import Guard

FIGURES = ("available_kv_cache_memory_bytes", "peak_activation_memory", "non_torch_memory")


class OwnTime:
    """Sums up the time of loadpeak's code on the worker's thread: all of it goes through guards."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        call = Guard.call

        def timed(guard: Guard, hook: str, function: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() or self._depth:
                return call(guard, hook, function, *args, **kwargs)
            self._depth += 1
            begun = time.perf_counter()
            try:
                return call(guard, hook, function, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun
                self._depth -= 1

        Guard.call = timed  # type: ignore[assignment, method-assign]


def measure(folder: Path, recording: bool, own: OwnTime, options: dict[str, Any]) -> dict[str, Any]:
    """One start: seconds, and what vLLM's memory profiling found."""
    os.environ["LOADPEAK_DISABLE"] = "0" if recording else "1"
    own.seconds = 0.0
    begun = time.perf_counter()
    llm = startup.start(folder, **options)
    seconds = time.perf_counter() - begun
    worker = startup.worker_of(llm)
    figures = {name: int(getattr(worker, name)) for name in FIGURES if hasattr(worker, name)}
    figures["model_memory_usage"] = int(getattr(worker.model_runner, "model_memory_usage", 0))
    del llm, worker
    startup.close()
    return {"recording": recording, "seconds": seconds, "own_seconds": own.seconds, **figures}


def main() -> None:
    """All pairs, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON for LLM(); repeat it")
    arguments = parser.parse_args()
    options = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.4}
    options |= {name: json.loads(value) for name, _, value in (o.partition("=") for o in arguments.option)}
    folder = startup.model_folder(arguments.config)
    own = OwnTime()
    os.environ["LOADPEAK_DISABLE"] = "0"
    measure(folder, True, own, options)
    runs: list[dict[str, Any]] = []
    for pair in range(arguments.pairs):
        for recording in (True, False) if pair % 2 == 0 else (False, True):
            runs.append(measure(folder, recording, own, options))
            print("RUN " + json.dumps(runs[-1]), flush=True)
    on = [run["seconds"] for run in runs if run["recording"]]
    off = [run["seconds"] for run in runs if not run["recording"]]
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    floor = [a / b for a, b in zip(off[1:], off[:-1], strict=True)]
    print(
        f"with    median {statistics.median(on):.3f} s  (min {min(on):.3f}, max {max(on):.3f}, n={len(on)})"
    )
    print(f"without median {statistics.median(off):.3f} s  (min {min(off):.3f}, max {max(off):.3f})")
    print(
        f"ratio by pair: median {statistics.median(ratios):.4f}  min {min(ratios):.4f}  max {max(ratios):.4f}"
    )
    print(f"noise floor, off against off: min {min(floor):.4f}  max {max(floor):.4f}")
    shares = [run["own_seconds"] / run["seconds"] for run in runs if run["recording"]]
    hooks = statistics.median(run["own_seconds"] for run in runs if run["recording"])
    print(f"time in hooks: median {hooks * 1000:.1f} ms, {statistics.median(shares):.3%} of a start")
    for name in (*FIGURES, "model_memory_usage"):
        if name not in runs[0]:
            continue
        values = {
            recording: sorted({run[name] for run in runs if run["recording"] is recording})
            for recording in (True, False)
        }
        print(f"{name}: with {values[True]} without {values[False]}")


if __name__ == "__main__":
    main()
