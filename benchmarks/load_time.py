"""Load time with the plugin against without, and vLLM's own profiling figures in both.

    python -m benchmarks.load_time CONFIG_JSON [--pairs 6]

Starts engines in one process, with and without recording in turn (with, without, without, with, …), so
that both arms see the same warm caches, and prints the median ratio, the noise floor (the same ratio
between the recordings-off starts themselves) and whether vLLM's memory profiling saw the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import startup

FIGURES = ("available_kv_cache_memory_bytes", "peak_activation_memory", "non_torch_memory")


def measure(folder: Path, recording: bool) -> dict[str, Any]:
    """One start: seconds, and what vLLM's memory profiling found."""
    os.environ["LOADPEAK_DISABLE"] = "0" if recording else "1"
    begun = time.perf_counter()
    llm = startup.start(folder, kv_cache_memory_bytes=None, gpu_memory_utilization=0.4)
    seconds = time.perf_counter() - begun
    worker = startup.worker_of(llm)
    figures = {name: int(getattr(worker, name)) for name in FIGURES}
    figures["model_memory_usage"] = int(worker.model_runner.model_memory_usage)
    del llm, worker
    startup.close()
    return {"recording": recording, "seconds": seconds, **figures}


def main() -> None:
    """All pairs, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    folder = startup.model_folder(arguments.config)
    os.environ["LOADPEAK_DISABLE"] = "0"
    measure(folder, True)
    runs: list[dict[str, Any]] = []
    for pair in range(arguments.pairs):
        for recording in (True, False) if pair % 2 == 0 else (False, True):
            runs.append(measure(folder, recording))
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
    for name in (*FIGURES, "model_memory_usage"):
        values = {
            recording: sorted({run[name] for run in runs if run["recording"] is recording})
            for recording in (True, False)
        }
        print(f"{name}: with {values[True]} without {values[False]}")


if __name__ == "__main__":
    main()
