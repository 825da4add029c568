"""The hooks on a small stand-in for vLLM; the real one is in tests/integration."""

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from loadpeak import vllm_adapter, vllm_worker
from loadpeak.guard import Guard
from loadpeak.record import Conversion, Failure, Line, Model, PhaseEnd, PhaseStart, Ready
from loadpeak.session import Session
from tests.fakes import FakeAllocator, Lines, MiB
from tests.profiler import fake_vllm
from tests.profiler.fake_vllm import LOADER, Engine, FusedMoEMethodBase, Module, QuantizeMethodBase, Worker


class Watch:
    """Installs the hooks and keeps what every started worker wrote."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.allocator = FakeAllocator()
        self.lines = Lines()
        self.sessions: list[Session] = []
        self.workers: list[vllm_worker.Worker] = []

    def begin(self, worker: vllm_worker.Worker) -> Session:
        session = Session(self.allocator, self.lines.append, guard=self.guard)
        self.sessions.append(session)
        self.workers.append(worker)
        return session

    def install(self) -> None:
        vllm_adapter.when_worker_starts(self.begin, self.guard)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Engine], Engine]]:
    meta_path = list(sys.meta_path)

    def put(engine: Engine) -> Engine:
        for name, module in engine.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return engine

    yield put
    sys.meta_path[:] = meta_path


def moe_model(method: QuantizeMethodBase | None = None, layers: int = 2) -> fake_vllm.Model:
    modules: dict[str, Module] = {"model.embed_tokens": Module(QuantizeMethodBase())}
    for number in range(layers):
        modules[f"model.layers.{number}.self_attn.qkv_proj"] = Module(QuantizeMethodBase())
        modules[f"model.layers.{number}.mlp.experts"] = Module(method or FusedMoEMethodBase())
        modules[f"model.layers.{number}.norm"] = Module()
    return fake_vllm.Model(modules)


def test_all_phases_and_layers_of_a_startup_are_seen(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model()]))
    watch.install()
    engine.start()
    assert [line.phase for line in watch.lines.of(PhaseStart)] == [
        "init_device",
        "create_model",
        "load_weights",
        "process_weights",
        "profile",
        "kv_cache",
        "warmup",
    ]
    assert len(watch.lines.of(PhaseEnd)) == 7
    assert watch.lines.one(Model).layers == (0, 1)
    conversions = watch.lines.of(Conversion)
    assert [(line.layer, line.moe, line.layer_done) for line in conversions] == [
        (None, False, False),
        (0, False, False),
        (0, True, True),
        (1, False, False),
        (1, True, True),
    ]
    assert watch.lines.one(Ready)
    assert watch.guard.errors == 0


def test_nothing_is_left_on_vllm_after_ready(install: Callable[[Engine], Engine], watch: Watch) -> None:
    engine = install(Engine([moe_model()]))
    before = {name: dict(vars(module)) for name, module in engine.modules.items()}
    watch.install()
    worker = engine.start()
    assert set(vars(worker)) == {"engine", "rank", "local_rank"}
    for name, module in engine.modules.items():
        assert dict(vars(module)) == before[name], name
    for module_ in engine.models[0].modules.values():
        assert set(vars(module_.quant_method or module_)) <= {"convert", "quant_method"}


def test_conversion_hooks_come_off_when_the_model_is_loaded(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    """A later weight update (RL) converts again while the engine serves: that is not a startup."""
    engine = install(Engine([moe_model()]))
    engine.on_profile = lambda: (
        engine.models[0]
        .modules["model.layers.0.mlp.experts"]
        .quant_method.process_weights_after_loading(None),
        None,
    )[1]
    watch.install()
    engine.start()
    assert len(watch.lines.of(Conversion)) == 5


def test_shared_quant_method_is_hooked_once_and_each_module_keeps_its_name(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    shared = FusedMoEMethodBase()
    engine = install(Engine([moe_model(shared, layers=3)]))
    watch.install()
    engine.start()
    names = [line.name for line in watch.lines.of(Conversion) if line.moe]
    assert names == [f"model.layers.{number}.mlp.experts" for number in range(3)]


def test_draft_model_is_numbered_on_and_its_phases_come_again(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model(layers=2), moe_model(layers=1)]))
    watch.install()
    engine.start()
    assert [line.layers for line in watch.lines.of(Model)] == [(0, 1), (2,)]
    assert [line.phase for line in watch.lines.of(PhaseStart)].count("create_model") == 2


def test_online_quantization_converts_inside_load_weights_and_a_second_time_later(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model(layers=1)]))

    def load(model: fake_vllm.Model) -> None:
        for module in model.modules.values():
            if module.quant_method is not None:
                module.quant_method.process_weights_after_loading(module)

    engine.on_load_weights = load
    watch.install()
    engine.start()
    lines = watch.lines.of(Conversion)
    assert [line.phase for line in lines] == ["load_weights"] * 3 + ["process_weights"] * 3
    assert [line.layer_done for line in lines] == [False, False, True, False, False, False]


def test_peak_inside_a_layer_belongs_to_that_layer(install: Callable[[Engine], Engine], watch: Watch) -> None:
    sizes = iter([10, 90])

    def convert(layer: Any) -> None:
        size = next(sizes) * MiB
        watch.allocator.allocate(size)
        watch.allocator.free(size)

    engine = install(Engine([moe_model(FusedMoEMethodBase(convert))]))
    watch.install()
    engine.start()
    assert [line.allocated_peak_bytes for line in watch.lines.of(Conversion) if line.moe] == [
        10 * MiB,
        90 * MiB,
    ]


def test_error_of_a_loader_passes_through_unchanged_and_is_recorded_once(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def convert(layer: Any) -> None:
        raise error

    engine = install(Engine([moe_model(FusedMoEMethodBase(convert))]))
    watch.install()
    with pytest.raises(RuntimeError) as caught:
        engine.start()
    assert caught.value is error
    assert watch.lines.of(Conversion)[-1].failed
    failure = watch.lines.one(Failure)
    assert (failure.message, failure.phase) == (str(error), "process_weights")
    assert not any(
        "process_weights_after_loading" in vars(m.quant_method)
        for m in engine.models[0].modules.values()
        if m.quant_method
    )


def test_conversion_that_vllm_recovers_from_is_not_a_failed_startup(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    def load(model: fake_vllm.Model) -> None:
        method = model.modules["model.layers.0.mlp.experts"].quant_method
        with pytest.raises(ValueError, match="try another way"):
            method.process_weights_after_loading(None)
        method.convert = lambda layer: None

    def convert(layer: Any) -> None:
        raise ValueError("try another way")

    engine = install(Engine([moe_model(FusedMoEMethodBase(convert))]))
    engine.on_load_weights = load
    watch.install()
    engine.start()
    assert watch.lines.one(Ready)
    assert not watch.lines.of(Failure)


def test_hooks_that_all_fail_leave_the_engine_as_it_was(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model()]))

    def broken(line: Line) -> None:
        raise OSError("no space left")

    watch.begin = lambda worker: Session(watch.allocator, broken, guard=watch.guard)  # type: ignore[method-assign]
    watch.install()
    engine.start()
    assert watch.guard.errors > 10


def test_hooks_that_cannot_be_put_on_are_counted_in_the_record(
    install: Callable[[Engine], Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = install(Engine([moe_model()]))
    sessions = Guard()
    watch.begin = lambda worker: Session(  # type: ignore[method-assign]
        watch.allocator, watch.lines.append, guard=sessions
    )

    def broken(observer: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(vllm_adapter._Observer, "attach", broken)
    watch.install()
    engine.start()
    assert (sessions.errors, watch.guard.errors) == (1, 0)


def test_hooks_are_put_on_while_another_thread_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing(dict[str, ModuleType]):
        """Modules that come while somebody goes through them."""

        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    module = ModuleType("vllm.made_up")
    module.name = "old"  # type: ignore[attr-defined]
    monkeypatch.setattr(vllm_adapter, "sys", SimpleNamespace(modules=Changing({"vllm.made_up": module})))
    vllm_adapter._swap("name", "old", "new")
    assert vars(module)["name"] == "new"


def test_session_that_cannot_begin_leaves_the_engine_alone(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model()]))

    def begin(worker: vllm_worker.Worker) -> Session:
        raise RuntimeError("broken")

    watch.begin = begin  # type: ignore[method-assign]
    watch.install()
    worker = engine.start()
    assert set(vars(worker)) == {"engine", "rank", "local_rank"}
    assert watch.guard.errors == 1


def test_vllm_without_a_name_we_hook_starts_all_the_same(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model()]))
    del engine.modules[LOADER + ".base_loader"].process_weights_after_loading

    class Loader:
        def load_model(self, model: fake_vllm.Model) -> None:
            pass

    for name in (LOADER, "vllm.v1.worker.gpu_model_runner"):
        engine.modules[name].get_model_loader = lambda config: Loader()  # type: ignore[attr-defined]
    watch.install()
    engine.start()
    assert watch.guard.errors >= 1
    assert watch.lines.one(Ready)


def test_two_engines_in_one_process_have_a_session_each(
    install: Callable[[Engine], Engine], watch: Watch
) -> None:
    engine = install(Engine([moe_model()]))
    watch.install()
    watch.install()
    engine.start()
    engine.start()
    assert len(watch.sessions) == 2
    assert len(watch.lines.of(Ready)) == 2


def test_worker_module_that_is_imported_later_is_hooked_then(
    install: Callable[[Engine], Engine], watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server loads plugins long before, or without ever, importing the worker module."""
    package = tmp_path / "vllm" / "v1" / "worker"
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", tmp_path / "vllm" / "v1", package):
        (folder / "__init__.py").touch()
    (package / "worker_base.py").write_text("class WorkerWrapperBase:\n    def init_device(self): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    finders = len(sys.meta_path)
    watch.install()
    assert len(sys.meta_path) == finders + 1
    module = importlib.import_module("vllm.v1.worker.worker_base")
    assert hasattr(module.WorkerWrapperBase.init_device, "__loadpeak__")
    assert len(sys.meta_path) == finders
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        sys.modules.pop(name)


def test_facts_of_the_engine_are_those_it_tells(install: Callable[[Engine], Engine], watch: Watch) -> None:
    engine = install(Engine([moe_model()]))
    watch.install()
    engine.start()
    facts = watch.workers[0].facts
    assert facts["engine_instance"] == "engine1", "data-parallel engines of one start share a run"
    assert (facts["engine_version"], facts["quantization"], facts["load_format"]) == (
        "0.26.0",
        "awq",
        "dummy",
    )


@pytest.mark.parametrize(
    ("world_size", "dp_rank", "rank", "expected"), [(1, 0, 0, 0), (4, 0, 3, 3), (4, 2, 1, 9), (1, 3, 0, 3)]
)
def test_rank_is_unique_over_data_parallel_engines(
    world_size: int, dp_rank: int, rank: int, expected: int
) -> None:
    engine = Engine([])
    engine.config.parallel_config.world_size = world_size
    engine.config.parallel_config.data_parallel_rank = dp_rank
    worker = Worker(engine)
    worker.rank = rank
    assert vllm_worker.Worker(worker, engine.config).rank == expected


def test_kept_split_limit_leaves_out_the_scope_and_can_be_undone() -> None:
    engine = Engine([])
    worker = Worker(engine)
    adapter = vllm_worker.Worker(worker, engine.config)
    loading = True
    assert adapter.keep_split_limit(lambda: loading)
    with worker._scoped_allocator_max_split(max_split_size_mb=20):
        pass
    assert engine.calls == []
    loading = False
    worker._scoped_allocator_max_split(20)
    assert engine.calls == ["limit 20"]
    adapter.restore_split_limit()
    assert "_scoped_allocator_max_split" not in vars(worker)


def test_pool_of_sleep_mode_is_known_under_its_old_and_new_name() -> None:
    engine = Engine([])
    worker = Worker(engine)
    assert vllm_worker.Worker(worker, engine.config).memory_pool is None
    engine.config.model_config.enable_sleep_mode = True
    assert vllm_worker.Worker(worker, engine.config).memory_pool == "cumem"
    engine.config.model_config.enable_cumem_allocator = False
    assert vllm_worker.Worker(worker, engine.config).memory_pool is None


def test_engine_that_its_owner_drops_is_freed(install: Callable[[Engine], Engine], watch: Watch) -> None:
    """A recording that kept the worker kept its model: the next engine in the process had no memory."""
    engine = install(Engine([moe_model()]))
    watch.install()
    alive = weakref.ref(engine.start())
    model = weakref.ref(engine.models.pop())
    gc.collect()
    assert alive() is None
    assert model() is None


def test_module_that_is_imported_while_loading_keeps_no_hook(
    install: Callable[[Engine], Engine], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's second model runner is imported inside init_device and takes get_model_loader by name."""
    engine = install(Engine([moe_model()]))
    late = ModuleType("vllm.v1.worker.gpu.model_runner")
    original = engine.modules[LOADER].get_model_loader

    def load(model: fake_vllm.Model) -> None:
        late.get_model_loader = engine.modules[LOADER].get_model_loader  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, late.__name__, late)

    engine.on_load_weights = load
    watch.install()
    engine.start()
    assert late.get_model_loader is original
