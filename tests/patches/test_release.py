"""The order of a release: convert, drop the sources, release. Each known loader is tried."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadpeak import settings
from loadpeak.record import Conversion, Fix
from loadpeak.recording import Recording
from loadpeak.session import Session
from loadpeak_patches import release, split_limit
from loadpeak_patches.policies import parse
from loadpeak_patches.release import CacheRelease
from loadpeak_patches.targets import TARGETS, Target, is_target
from tests.fakes import AbsentAllocator, FakeAllocator, Lines, MiB, phase_of


class Layer:
    """A fused-MoE layer before its conversion: source weights of 64 MiB."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self.sources: int | None = 64 * MiB
        allocator.allocate(64 * MiB)


class Loader:
    """A loader as the targets are: converts, then drops its sources."""

    def __init__(self, allocator: FakeAllocator, events: list[str]) -> None:
        self.allocator, self.events = allocator, events

    def process_weights_after_loading(self, layer: Layer) -> None:
        self.events.append("convert")
        self.allocator.allocate(64 * MiB)
        assert layer.sources is not None
        self.allocator.free(layer.sources)
        layer.sources = None
        self.events.append("drop sources")


class Watched(FakeAllocator):
    """An allocator that notes when it was asked to release, and what was live then."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def release(self) -> None:
        self.events.append(f"release with {self.allocated // MiB} MiB live")
        super().release()


def convert(session: Session, loader: Any, layer: Layer, method: str, moe: bool = True) -> None:
    """What the hook around process_weights_after_loading does (loadpeak.vllm_adapter)."""
    watch = session.start_conversion()
    try:
        loader.process_weights_after_loading(layer)
    except BaseException:
        session.end_conversion(watch, name="experts", method=method, moe=moe, failed=True)
        raise
    session.end_conversion(watch, name="experts", method=method, moe=moe)


def _name(target: Target) -> str:
    return f"{target.engine}:{target.weights}"


@pytest.mark.parametrize("target", TARGETS, ids=_name)
def test_release_comes_after_the_loader_has_dropped_its_sources(target: Target) -> None:
    events: list[str] = []
    allocator, lines = Watched(events), Lines()
    session = Session(allocator, lines.append)
    CacheRelease(session, parse("moe-layer")).apply()
    method = f"{target.qualified_module}.{target.name or 'NVFP4SM70MoEMethod'}"
    convert(session, Loader(allocator, events), Layer(allocator), method, moe=False)
    assert events == ["convert", "drop sources", "release with 64 MiB live"]
    assert lines.one(Conversion).released_bytes == 64 * MiB


def test_linear_method_is_no_target() -> None:
    assert not is_target("vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod")
    assert not is_target("vllm.model_executor.layers.quantization.nvfp4_sm70_moe.Helper")


def test_nothing_is_released_when_the_loader_raises_and_its_error_is_unchanged() -> None:
    events: list[str] = []
    allocator = Watched(events)
    session = Session(allocator, Lines().append)
    CacheRelease(session, parse("layer")).apply()
    error = RuntimeError("CUDA out of memory")

    class Broken(Loader):
        def process_weights_after_loading(self, layer: Layer) -> None:
            raise error

    with pytest.raises(RuntimeError) as caught:
        convert(session, Broken(allocator, events), Layer(allocator), "m.M")
    assert caught.value is error
    assert events == []


def test_applying_twice_releases_once_and_removing_stops_it() -> None:
    events: list[str] = []
    allocator = Watched(events)
    session = Session(allocator, Lines().append)
    fix = CacheRelease(session, parse("moe-layer"))
    fix.apply()
    fix.apply()
    convert(session, Loader(allocator, []), Layer(allocator), "m.M")
    assert len(events) == 1
    fix.remove()
    fix.remove()
    convert(session, Loader(allocator, []), Layer(allocator), "m.M")
    assert len(events) == 1


class FakeWorker:
    """As much of the adapter's Worker as the fixes ask for."""

    def __init__(self, memory_pool: str | None = None, has_scope: bool = True) -> None:
        self.memory_pool, self.has_scope = memory_pool, has_scope
        self.kept: Any = None
        self.restored = False

    def keep_split_limit(self, loading: Any) -> bool:
        self.kept = loading if self.has_scope else None
        return self.has_scope

    def restore_split_limit(self) -> None:
        self.restored = True


def recording(
    environ: dict[str, str], worker: FakeWorker | None = None, allocator: FakeAllocator | None = None
) -> tuple[Recording, Lines, FakeAllocator]:
    lines, allocator = Lines(), allocator or FakeAllocator()
    fake = SimpleNamespace(
        session=Session(allocator, lines.append),
        settings=settings.load({"LOADPEAK_HOME": str(Path("/nowhere")), **environ}),
        worker=worker or FakeWorker(),
    )
    release.attach(cast("Recording", fake))
    split_limit.attach(cast("Recording", fake))
    session: Session = fake.session
    with phase_of(session, "init_device"):
        pass
    return cast("Recording", fake), lines, allocator


def test_fixes_are_off_unless_asked_for() -> None:
    fake, lines, allocator = recording({})
    convert(fake.session, Loader(allocator, []), Layer(allocator), "m.M")
    assert allocator.releases == 0
    assert not lines.of(Fix)


def test_release_that_is_asked_for_is_recorded_as_active() -> None:
    fake, lines, allocator = recording({"LOADPEAK_CACHE_RELEASE": "moe-layer"})
    convert(fake.session, Loader(allocator, []), Layer(allocator), "m.M")
    assert allocator.releases == 1
    assert lines.one(Fix).active


@pytest.mark.parametrize(
    ("worker", "allocator", "reason"),
    [
        (FakeWorker(memory_pool="cumem"), FakeAllocator(), "cumem pool"),
        (FakeWorker(), AbsentAllocator(), "no CUDA caching allocator"),
    ],
)
def test_release_without_effect_says_that_it_is_inactive(
    worker: FakeWorker, allocator: FakeAllocator, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fake, lines, _ = recording({"LOADPEAK_CACHE_RELEASE": "moe-layer"}, worker, allocator)
    convert(fake.session, Loader(allocator, []), Layer(allocator), "m.M")
    assert allocator.releases == 0
    assert reason in lines.one(Fix).detail
    assert reason in caplog.text


def test_kept_split_limit_covers_loading_and_nothing_later() -> None:
    worker = FakeWorker()
    fake, lines, _ = recording({"LOADPEAK_SPLIT_LIMIT": "keep"}, worker)
    assert lines.one(Fix).active
    assert worker.kept(), "load_model begins while the last phase was init_device"
    for phase, loading in (("process_weights", True), ("profile", False), ("warmup", False)):
        with phase_of(fake.session, phase):  # type: ignore[arg-type]
            assert worker.kept() is loading
    fake.session.ready()
    assert worker.restored


@pytest.mark.parametrize(
    ("worker", "allocator", "reason"),
    [
        (FakeWorker(has_scope=False), FakeAllocator(), "does not change the split limit"),
        (FakeWorker(), AbsentAllocator(), "no CUDA caching allocator"),
    ],
)
def test_kept_split_limit_without_effect_says_so(
    worker: FakeWorker, allocator: FakeAllocator, reason: str
) -> None:
    _, lines, _ = recording({"LOADPEAK_SPLIT_LIMIT": "keep"}, worker, allocator)
    assert not lines.one(Fix).active
    assert reason in lines.one(Fix).detail
