"""Does a sampler see a short plateau of device memory while the worker holds the interpreter lock?

    python -m benchmarks.sampler [--tries 100] [--nvitop]

The worker allocates 1 GiB for 10 ms, then idles, and holds the interpreter lock for all of each half
second. Three samplers watch the same plateaus: loadpeak's process, a thread inside the worker (both at
10 ms) and, with ``--nvitop``, nvitop's exporter scraped once a second. Prints plateaus seen and longest
gaps. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from loadpeak.record import Sample, decode_line
from loadpeak.sampler.process import SamplerProcess

SIZE = 1 << 30
PLATEAU_SECONDS, HELD_SECONDS, INTERVAL_SECONDS = 0.010, 0.5, 0.01


class Cuda:
    """The CUDA runtime called with the interpreter lock held (``PyDLL``)."""

    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda")
        name = next(
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "libcudart" in line
        )
        self.held: list[float] = []
        self._runtime, self._libc = ctypes.PyDLL(name), ctypes.PyDLL(None)

    def plateau(self) -> tuple[float, float]:
        """1 GiB for 10 ms; returns from when to when it can have been there, both calls included."""
        pointer = ctypes.c_void_p()
        begun = time.monotonic()
        if self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(SIZE)):
            raise MemoryError("cudaMalloc failed")
        there = time.monotonic()
        self.hold(PLATEAU_SECONDS)
        self.held.append((time.monotonic() - there) * 1000)
        self._runtime.cudaFree(pointer)
        return begun, time.monotonic()

    def hold(self, seconds: float) -> None:
        """Sleep with the interpreter lock held."""
        self._libc.usleep(int(seconds * 1e6))


class Thread(threading.Thread):
    """The sampling thread that is compared with."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.readings: list[tuple[float, int]] = []
        self.stopped = False

    def run(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self.stopped:
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used)
            self.readings.append((time.monotonic(), used))
            time.sleep(INTERVAL_SECONDS)


SCRAPER = """
import json, re, sys, time, urllib.request
while True:
    begun = time.monotonic()
    try:
        text = urllib.request.urlopen("http://127.0.0.1:9842/metrics", timeout=5).read().decode()
    except OSError:
        time.sleep(0.2); continue
    for line in text.splitlines():
        match = re.match(r"gpu_memory_used_[A-Za-z]+\\{.*\\} ([0-9.e+]+)", line)
        if match:
            print(json.dumps([begun, time.monotonic(), float(match[1])]), flush=True)
            break
    time.sleep(max(0, begun + 1 - time.monotonic()))
"""


def seen(plateaus: list[tuple[float, float]], readings: list[tuple[float, int]], base: int) -> int:
    """Plateaus within which a reading shows most of the size."""
    times = [at for at, _ in readings]
    count = 0
    for begun, ended in plateaus:
        inside = readings[bisect.bisect_left(times, begun) : bisect.bisect_right(times, ended)]
        count += any(used - base > SIZE // 2 for _, used in inside)
    return count


def gap(readings: list[tuple[float, int]]) -> float:
    """Longest time between two readings, milliseconds."""
    times = [at for at, _ in readings]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0) * 1000


def start_nvitop() -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """nvitop's exporter and a scraper, once a second."""
    exporter = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "nvitop_exporter",
            "--bind-address",
            "127.0.0.1",
            "--port",
            "9842",
            "--interval",
            "1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for _ in range(100):
        try:
            urllib.request.urlopen("http://127.0.0.1:9842/metrics", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    return exporter, subprocess.Popen([sys.executable, "-c", SCRAPER], stdout=subprocess.PIPE, text=True)


def main() -> None:
    """The tries, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--nvitop", action="store_true")
    arguments = parser.parse_args()
    import torch

    cuda = Cuda()
    base = torch.cuda.mem_get_info()
    path = Path(tempfile.mkdtemp()) / "device-0.jsonl"
    sampler = SamplerProcess(path, 0, INTERVAL_SECONDS)
    sampler.device(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    thread = Thread()
    thread.start()
    others: Any = start_nvitop() if arguments.nvitop else None
    time.sleep(2)
    floor = thread.readings[-1][1]
    plateaus = []
    for _ in range(arguments.tries):
        plateaus.append(cuda.plateau())
        cuda.hold(HELD_SECONDS - PLATEAU_SECONDS)
    thread.stopped = True
    sampler.stop()
    time.sleep(0.5)
    lines = [decode_line(line) for line in path.read_bytes().splitlines()]
    samples = [line for line in lines if isinstance(line, Sample)]
    ours = [(line.at_seconds, line.used_bytes or 0) for line in samples]
    longest = max(line.gap_seconds or 0 for line in samples) * 1000
    print(f"device memory free at the start: {base[0] >> 20} of {base[1] >> 20} MiB")
    print(f"plateaus held {min(cuda.held):.2f} to {max(cuda.held):.2f} ms")
    rows = [
        ("loadpeak's process, 10 ms", seen(plateaus, ours, floor), longest),
        ("thread in the worker, 10 ms", seen(plateaus, thread.readings, floor), gap(thread.readings)),
    ]
    if others:
        for process in others:
            process.terminate()
        scrapes = [json.loads(line) for line in others[1].stdout]
        shown = [(start - 0.05, end, value * (1 << 20) - floor > SIZE // 2) for start, end, value in scrapes]
        caught = sum(
            any(high and start <= ended and end >= begun for start, end, high in shown)
            for begun, ended in plateaus
        )
        rows.append(
            ("nvitop-exporter, scraped each second", caught, gap([(start, 0) for start, _, _ in scrapes]))
        )
    print("| sampler | plateaus seen | longest gap ms |")
    print("|---|---|---|")
    for name, count, milliseconds in rows:
        print(f"| {name} | {count} of {len(plateaus)} | {milliseconds:.1f} |")


if __name__ == "__main__":
    main()
