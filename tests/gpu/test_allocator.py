"""The model beside the real allocator on random programs. Run with ``pytest -m gpu`` where there is a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadpeak import torch_history
from loadpeak.allocator.model import AllocatorModel, OutOfMemoryError
from loadpeak.allocator.pools import Block
from loadpeak.allocator.settings import parse
from loadpeak.allocator.sizes import MIB
from loadpeak.snapshot import read

pytestmark = pytest.mark.gpu

CAP = 1536 * MIB
STEPS = 1200
DEFAULTS = "expandable_segments:False,max_non_split_rounding_mb:20"


@pytest.fixture
def torch() -> Iterator[Any]:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("there is no CUDA device")
    module.zeros(1, device="cuda")
    total = module.cuda.get_device_properties(0).total_memory
    module.cuda.empty_cache()
    base = module.cuda.memory_reserved()
    module.cuda.set_per_process_memory_fraction((CAP + base) / total, 0)
    yield module
    module._C._accelerator_setAllocatorSettings(DEFAULTS)
    module.cuda.set_per_process_memory_fraction(1.0, 0)
    module.cuda.empty_cache()


def size(numbers: random.Random) -> int:
    """A request, in bytes: many small ones, some around the limits, some large."""
    kind = numbers.random()
    if kind < 0.5:
        return numbers.randint(1, MIB)
    if kind < 0.8:
        return numbers.randint(MIB, 24 * MIB)
    if kind < 0.9:
        return numbers.choice([512, MIB, MIB + 1, 10 * MIB, 20 * MIB, 21 * MIB])
    return numbers.randint(20 * MIB, 160 * MIB)


class Both:
    """The same program in the real allocator, on a stream of its own, and in the model."""

    def __init__(self, torch: Any, conf: str) -> None:
        self.torch = torch
        torch._C._accelerator_setAllocatorSettings(f"{DEFAULTS},{conf}".rstrip(","))
        torch.cuda.empty_cache()
        self.stream = torch.cuda.Stream()
        self.base = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        self.base_retries = torch.cuda.memory_stats()["num_alloc_retries"]
        self.model = AllocatorModel(parse(conf), CAP + self.base[0])
        self.model.memory.adopt(self.base[0])
        self.live: list[tuple[Any, Block]] = []

    def alloc(self, requested: int) -> None:
        try:
            with self.torch.cuda.stream(self.stream):
                tensor = self.torch.empty(requested, dtype=self.torch.uint8, device="cuda")
        except self.torch.OutOfMemoryError:
            with pytest.raises(OutOfMemoryError):
                self.model.alloc(requested)
        else:
            self.live.append((tensor, self.model.alloc(requested)))

    def free(self, place: int) -> None:
        tensor, block = self.live.pop(place % len(self.live))
        del tensor
        self.model.free(block)

    def empty(self) -> None:
        self.torch.cuda.empty_cache()
        self.model.empty_cache()

    def figures(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Reserved, allocated and retries, really and in the model."""
        cuda = self.torch.cuda
        retries = cuda.memory_stats()["num_alloc_retries"] - self.base_retries
        return (
            (cuda.memory_reserved(), cuda.memory_allocated() - self.base[1], retries),
            (self.model.memory.reserved_bytes, self.model.allocated_bytes, self.model.retries),
        )

    def run(self, seed: int) -> Iterator[int]:
        """A random program; yields the number of each step."""
        numbers = random.Random(seed)
        for step in range(STEPS):
            chance = numbers.random()
            if chance < 0.004:
                self.empty()
            elif chance < 0.52 or not self.live:
                self.alloc(size(numbers))
            else:
                self.free(numbers.randint(0, 1 << 30))
            yield step


@pytest.fixture
def both(torch: Any, conf: str) -> Iterator[Both]:
    """What a failed test still holds must not stay in the next one's way."""
    found = Both(torch, conf)
    yield found
    found.live.clear()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        "expandable_segments:True,max_split_size_mb:20",
        "expandable_segments:True,roundup_power2_divisions:4",
    ],
)
def test_expandable_segments_are_modelled_step_by_step(both: Both, seed: int) -> None:
    for step in both.run(seed):
        real, model = both.figures()
        assert model == real, f"step {step}"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("conf", "tolerance"),
    [
        ("", 0.005),
        ("max_split_size_mb:20", 0.005),
        ("garbage_collection_threshold:0.6", 0.005),
        # Rounding makes many blocks of one size, between which the addresses decide.
        ("roundup_power2_divisions:4", 0.02),
    ],
)
def test_ordinary_segments_are_modelled_up_to_their_addresses(
    both: Both, conf: str, tolerance: float, seed: int
) -> None:
    """Between free blocks of one size the lower address wins, and the device's addresses are its own."""
    peaks, same = [0, 0], 0
    for _ in both.run(seed):
        real, model = both.figures()
        peaks = [max(peaks[0], real[0]), max(peaks[1], model[0])]
        same += real == model
    print(f"{conf or 'default'}, seed {seed}: {same} of {STEPS} steps equal, peaks {peaks}")
    assert abs(peaks[0] - peaks[1]) <= tolerance * peaks[0]


def test_recorded_history_is_read_back(torch: Any, tmp_path: Path) -> None:
    path = tmp_path / "history-0.pickle.gz"
    torch_history.start(10_000)
    try:
        held = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        del held
        torch_history.write(path)
    finally:
        torch_history.stop()
    history = next(one for one in read(path).histories if one.device == torch.cuda.current_device())
    assert list(history.operations)[:3] == [30 * MIB] * 3
    assert history.recorded_peak_bytes == torch.cuda.memory_stats()["reserved_bytes.all.current"]
