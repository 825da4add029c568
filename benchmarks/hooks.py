"""What one hooked conversion costs, and what reading the allocator's settings costs.

    python -m benchmarks.hooks

On a GPU with torch: the real allocator; elsewhere the statistics are missing and only our own part is
timed. The journal is a real file.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loadpeak.journal import Journal
from loadpeak.session import Session
from loadpeak.torch_allocator import TorchAllocator


def microseconds(action: Callable[[], object], repeats: int) -> list[float]:
    """Time of each call."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - begun) / 1000)
    return times


def main() -> None:
    """Both costs, with the number of live blocks beside the second."""
    import torch

    cuda = torch.cuda.is_available()
    allocator = TorchAllocator()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(allocator, Journal(Path(folder) / "rank-0.jsonl").append)

        def conversion() -> None:
            watch = session.start_conversion()
            session.end_conversion(
                watch, name="model.layers.12.mlp.experts", method="m.M", moe=True, layer=12
            )

        if cuda:
            torch.zeros(1, device="cuda")
        times = microseconds(conversion, 2000)
        slow = sorted(times)[1980]
        print(f"hooked conversion: median {statistics.median(times):.0f} µs, 99th percentile {slow:.0f} µs")
        if not cuda:
            print("no CUDA here: the cost of reading the allocator is not in these figures")
            return
        for blocks in (10, 1000, 5000):
            held = [torch.empty(4096, dtype=torch.uint8, device="cuda") for _ in range(blocks)]
            times = microseconds(allocator.settings, 20)
            median = statistics.median(times) / 1000
            print(f"reading the settings with {blocks} live blocks: median {median:.2f} ms")
            del held
        print("settings:", allocator.settings())


if __name__ == "__main__":
    main()
