"""A vLLM small enough to read: the names that loadpeak hooks, in the order in which vLLM calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

LOADER = "vllm.model_executor.model_loader"
BASE_CONFIG = "vllm.model_executor.layers.quantization.base_config"


class QuantizeMethodBase:
    def __init__(self, convert: Callable[[Any], None] = lambda layer: None) -> None:
        self.convert = convert

    def process_weights_after_loading(self, layer: Any) -> str:
        self.convert(layer)
        return "converted"


class FusedMoEMethodBase(QuantizeMethodBase):
    pass


class Module:
    def __init__(self, quant_method: Any = None) -> None:
        self.quant_method = quant_method


class Model:
    """A model of named modules."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        yield from self.modules.items()


class Worker:
    """What vLLM's GPU worker does at startup, as far as it matters here."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rank = self.local_rank = 0

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Any:
        self.engine.calls.append(f"limit {max_split_size_mb}")
        return SimpleNamespace()

    def init_device(self) -> None:
        self.engine.calls.append("init_device")

    def load_model(self) -> None:
        runner = sys.modules["vllm.v1.worker.gpu_model_runner"]
        for model in self.engine.models:
            runner.get_model_loader(None).load_model(model)

    def determine_available_memory(self) -> int:
        self.engine.on_profile()
        return 42

    def initialize_from_config(self, config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> float:
        return 1.5


class Engine:
    """Installs the fake modules and starts workers the way an executor does."""

    def __init__(self, models: list[Model], import_worker_module: bool = True) -> None:
        self.models = models
        self.calls: list[str] = []
        self.on_load_weights: Callable[[Model], None] = lambda model: None
        self.on_profile: Callable[[], None] = lambda: None
        self.config = SimpleNamespace(
            instance_id="engine1_dp0",
            parallel_config=SimpleNamespace(
                world_size=1, tensor_parallel_size=1, data_parallel_size=1, data_parallel_rank=0
            ),
            model_config=SimpleNamespace(model="m", quantization="awq", enable_sleep_mode=False),
            load_config=SimpleNamespace(load_format="dummy"),
        )
        self._build()
        if import_worker_module:
            self.import_worker_module()

    def _build(self) -> None:
        self.modules = {
            name: ModuleType(name)
            for name in (
                "vllm",
                "vllm.v1.worker.gpu_model_runner",
                LOADER,
                LOADER + ".base_loader",
                LOADER + ".utils",
                BASE_CONFIG,
            )
        }
        utils, base = self.modules[LOADER + ".utils"], self.modules[LOADER + ".base_loader"]
        self.modules["vllm"].__version__ = "0.26.0"  # type: ignore[attr-defined]
        self.modules[BASE_CONFIG].QuantizeMethodBase = QuantizeMethodBase  # type: ignore[attr-defined]

        def initialize_model(model: Model) -> Model:
            return model

        def process_weights_after_loading(model: Model) -> None:
            for _, module in model.named_modules():
                if module.quant_method is not None:
                    assert module.quant_method.process_weights_after_loading(module) == "converted"

        engine = self

        class Loader:
            def load_weights(self, model: Model) -> None:
                engine.on_load_weights(model)

            def load_model(self, model: Model) -> Model:
                model = base.initialize_model(model)
                self.load_weights(model)
                base.process_weights_after_loading(model)
                return model

        def get_model_loader(config: Any) -> Loader:
            return Loader()

        for module in (utils, base):
            module.initialize_model = initialize_model  # type: ignore[attr-defined]
            module.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]
        for name in (LOADER, "vllm.v1.worker.gpu_model_runner"):
            self.modules[name].get_model_loader = get_model_loader  # type: ignore[attr-defined]

    def import_worker_module(self) -> None:
        """What happens when the executor imports ``worker_base``."""
        module = ModuleType("vllm.v1.worker.worker_base")

        class WorkerWrapperBase:
            def __init__(wrapper, worker: Worker, config: Any) -> None:
                wrapper.worker, wrapper.vllm_config = worker, config

            def init_device(wrapper) -> None:
                wrapper.worker.init_device()

        module.WorkerWrapperBase = WorkerWrapperBase  # type: ignore[attr-defined]
        self.modules[module.__name__] = module

    def start(self, worker: Worker | None = None) -> Worker:
        """Start one worker up to ready."""
        worker = worker or Worker(self)
        wrapper = self.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase(worker, self.config)
        wrapper.init_device()
        worker.load_model()
        assert worker.determine_available_memory() == 42
        worker.initialize_from_config(None)
        assert worker.compile_or_warm_up_model() == 1.5
        return worker
