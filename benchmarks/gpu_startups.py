"""Record baseline, release and kept split limit on a GPU, beside an independent sampling of the device.

    python -m benchmarks.gpu_startups CONFIG_JSON [--cap-gib 32] [--home FOLDER] [--conf CONF …]

For each allocator setting and each variant: one fresh process, one startup, recorded by loadpeak;
meanwhile another process reads NVML every 10 ms, from the start to ready. Prints a table in MiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MIB = 1 << 20
VARIANTS: dict[str, dict[str, str]] = {
    "baseline": {},
    "moe-layer": {"LOADPEAK_CACHE_RELEASE": "moe-layer"},
    "split-keep": {"LOADPEAK_SPLIT_LIMIT": "keep"},
    "both": {"LOADPEAK_CACHE_RELEASE": "moe-layer", "LOADPEAK_SPLIT_LIMIT": "keep"},
}


def independent_sampler(stop: Connection, interval_seconds: float) -> None:
    """Times and device use until told to stop, read without any of loadpeak's code."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    readings, due = [], time.monotonic()
    while not stop.poll():
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used)
        readings.append((time.monotonic(), used))
        due += interval_seconds
        time.sleep(max(0.0, due - time.monotonic()))
    stop.send(readings)


def recorded(home: Path, run: str) -> dict[str, Any]:
    """What the record of a run says: highest device use, highest reserved and allocated, retries."""
    from loadpeak.record import Conversion, PhaseEnd, Ready, Sample, decode_line

    found: dict[str, Any] = {"device": 0, "reserved": 0, "allocated": 0, "retries": None, "ready": None}
    found |= {"began_at": float("inf"), "ready_at": float("inf")}
    for path in sorted((home / "runs" / run).glob("*.jsonl")):
        for text in path.read_bytes().splitlines():
            line = decode_line(text)
            found["began_at"] = min(found["began_at"], line.at_seconds)
            if isinstance(line, Sample):
                found["device"] = max(found["device"], line.phase_peak_bytes or 0)
            elif isinstance(line, PhaseEnd | Conversion):
                found["reserved"] = max(found["reserved"], line.reserved_peak_bytes or 0)
                found["allocated"] = max(found["allocated"], line.allocated_peak_bytes or 0)
            elif isinstance(line, Ready):
                found["ready"], found["retries"] = line.memory.allocated_bytes, line.memory.retries
                found["ready_at"] = line.at_seconds
    return found


def startup(arguments: argparse.Namespace, conf: str, variant: str, run: str) -> dict[str, Any]:
    """One startup in a fresh process, with the independent sampler beside it."""
    ours, theirs = multiprocessing.Pipe()
    sampler = multiprocessing.get_context("spawn").Process(target=independent_sampler, args=(theirs, 0.01))
    sampler.start()
    environ = {
        **os.environ,
        **VARIANTS[variant],
        "LOADPEAK_HOME": str(arguments.home),
        "LOADPEAK_RUN_ID": run,
        "LOADPEAK_VARIANT": variant,
        "LOADPEAK_EXPERIMENT": arguments.experiment,
    }
    environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if conf != "default":
        environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
    command = [sys.executable, "-m", "benchmarks.startup", str(arguments.config)]
    command += ["--cap-gib", str(arguments.cap_gib)] if arguments.cap_gib else []
    command += [part for option in arguments.option for part in ("--option", option)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    ours.send("stop")
    readings: list[tuple[float, int]] = ours.recv()
    sampler.join()
    result = next((text[7:] for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    if result is None:
        print(done.stdout[-1500:], done.stderr[-3000:], sep="\n", file=sys.stderr)
    record = recorded(arguments.home, run)
    return {
        "conf": conf,
        "variant": variant,
        "run": run,
        "independent": max(used for at, used in readings if at <= record["ready_at"]),
        **record,
        **(json.loads(result) if result else {}),
    }


def main() -> None:
    """All combinations, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--home", type=Path, default=Path("/tmp/loadpeak-home"))
    parser.add_argument("--conf", action="append", help="allocator setting; repeat it")
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--experiment", default="gpu-startups")
    parser.add_argument("--warm-up", action="store_true", help="start once before, to fill kernel caches")
    arguments = parser.parse_args()
    if arguments.warm_up:
        startup(arguments, "default", "baseline", f"{arguments.experiment}-warm-up")
    rows = []
    for conf in arguments.conf or ["expandable_segments:True", "default"]:
        for variant in arguments.variant or ["baseline", "moe-layer", "split-keep"]:
            name = f"{arguments.experiment}-{'expandable' if 'expandable' in conf else 'default'}-{variant}"
            rows.append(startup(arguments, conf, variant, name))
            print("ROW " + json.dumps(rows[-1]), flush=True)
    columns = ["setting", "variant", "device peak", "independent", "reserved peak", "retries"]
    columns += ["ready allocated", "tokens"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        peaks = [f"{row[name] / MIB:,.0f}" for name in ("device", "independent", "reserved")]
        ready = f"{row['ready'] / MIB:,.3f}" if row["ready"] else "—"
        cells = [row["conf"], row["variant"], *peaks, str(row["retries"]), ready, str(row.get("tokens"))]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
