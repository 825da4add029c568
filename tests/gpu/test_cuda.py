"""The real caching allocator and the real NVML. Run with ``pytest -m gpu`` on a machine with a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loadpeak.record import Conversion, PhaseEnd
from loadpeak.sampler.devices import Nvml
from loadpeak.session import Session
from loadpeak.torch_allocator import TorchAllocator, is_out_of_memory, wrap_resets
from loadpeak_patches.policies import parse
from loadpeak_patches.release import CacheRelease
from tests.fakes import Lines, MiB, phase_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch(need: Callable[[bool, str], None]) -> Iterator[Any]:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("there is no CUDA device")
    module.cuda.empty_cache()
    module.zeros(1, device="cuda")
    yield module
    module.cuda.empty_cache()


def test_readings_are_those_of_torch(torch: Any) -> None:
    allocator = TorchAllocator()
    held = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")
    memory = allocator.read()
    assert memory.allocated_bytes == torch.cuda.memory_allocated()
    assert memory.reserved_bytes == torch.cuda.memory_reserved()
    assert memory.retries == torch.cuda.memory_stats()["num_alloc_retries"]
    del held


def test_peak_is_the_highest_since_the_reset_whoever_resets(torch: Any) -> None:
    allocator, lines = TorchAllocator(), Lines()
    session = Session(allocator, lines.append)
    with phase_of(session, "load_weights"):
        pass
    originals = [(module, name, getattr(module, name)) for module, name, _ in wrap_resets(lambda: None)]
    for module, name, wrapped in wrap_resets(session.before_reset):
        setattr(module, name, wrapped)
    try:
        with phase_of(session, "process_weights"):
            before = torch.cuda.memory_allocated()
            held = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
            del held
            torch.cuda.reset_peak_memory_stats()
            torch.accelerator.reset_peak_memory_stats()
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
    assert lines.of(PhaseEnd)[-1].allocated_peak_bytes == before + 256 * MiB


def test_settings_are_those_in_force(torch: Any) -> None:
    allocator = TorchAllocator()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    try:
        assert "max_split_size_mb:20" in (allocator.settings() or "")
    finally:
        torch._C._accelerator_setAllocatorSettings(f"max_split_size_mb:{(2**64 - 1) >> 20}")
    assert "max_split_size_mb:20" not in (allocator.settings() or "")


def test_release_gives_cached_blocks_back(torch: Any) -> None:
    allocator, lines = TorchAllocator(), Lines()
    session = Session(allocator, lines.append)
    CacheRelease(session, parse("moe-layer")).apply()
    watch = session.start_conversion()
    held = torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
    del held
    session.end_conversion(watch, name="experts", method="m.M", moe=True, layer=0)
    line = lines.one(Conversion)
    assert line.released_bytes is not None
    assert line.released_bytes >= 512 * MiB
    assert line.after.reserved_bytes == torch.cuda.memory_reserved()


def test_out_of_memory_is_known_as_such(torch: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_device_of_torch_is_found_in_nvml_by_its_uuid(torch: Any) -> None:
    uuid = TorchAllocator().device_uuid()
    assert uuid is not None
    device, read = Nvml().by_uuid(uuid)
    assert device.uuid == uuid
    free, total = torch.cuda.mem_get_info()
    assert abs((read() or 0) - (total - free)) < 1 << 30
