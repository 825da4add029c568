"""Hooks on vLLM (0.26 to 0.32, and forks of it); facts are read in ``vllm_worker``.

Nothing of vLLM is imported before vLLM has imported it itself. Hooks sit on the worker object, on
quantization method objects and on a few module globals; all are taken off when the startup is over,
so serving runs vLLM's own code only.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loadpeak.layers import LayerNumbers, NamedModule
from loadpeak.torch_allocator import wrap_resets
from loadpeak.vllm_worker import Worker

if TYPE_CHECKING:
    from loadpeak.guard import Guard
    from loadpeak.record import Phase
    from loadpeak.session import ConversionWatch, Session

WORKER_MODULE = "vllm.v1.worker.worker_base"
_LOADER = "vllm.model_executor.model_loader"


# ── where a worker starts ─────────────────────────────────────────────────────────────────────────


def when_worker_starts(begin: Callable[[Worker], Session | None], guard: Guard) -> None:
    """Call ``begin`` at the start of every worker's ``init_device``, in this process and its forks.

    ``begin`` returns the session that records the worker, or nothing to leave it alone.
    """

    def patch(module: ModuleType) -> None:
        wrapper_class = module.WorkerWrapperBase
        original = wrapper_class.init_device
        if hasattr(original, "__loadpeak__"):
            return

        @functools.wraps(original)
        def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            worker = wrapper.worker
            session = guard.call("start", begin, Worker(worker, wrapper.vllm_config))
            if session is None:
                return original(wrapper, *args, **kwargs)
            session.guard.call("observe", _Observer(worker, session).attach)
            return _phase("init_device", functools.partial(original, wrapper), session, scope=True)(
                *args, **kwargs
            )

        init_device.__loadpeak__ = True  # type: ignore[attr-defined]
        wrapper_class.init_device = init_device

    when_imported(WORKER_MODULE, lambda module: guard.call("patch", patch, module))


def when_imported(name: str, action: Callable[[ModuleType], Any]) -> None:
    """Run ``action`` on a module: now if it is there, else right after its import."""
    if name in sys.modules:
        action(sys.modules[name])
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    action(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


# ── hooks ─────────────────────────────────────────────────────────────────────────────────────────


class _Patches:
    """Attributes that were replaced and can be put back."""

    _ABSENT = object()

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, self._ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is self._ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _phase(
    phase: Phase | None,
    original: Callable[..., Any],
    session: Session,
    *,
    scope: bool = False,
    finally_: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """A function that runs ``original`` as a phase.

    Args:
        phase: its name, or nothing for a scope without a phase of its own.
        original: vLLM's function.
        session: told about it.
        scope: whether an error that leaves it ends the startup.
        finally_: given the result, or nothing after an error, when the phase is over.
    """
    guard = session.guard

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if phase is not None:
            guard.call(phase, session.start_phase, phase)
        result = None
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if scope:
                guard.call("failure", session.failed, error)
            raise
        finally:
            if phase is not None:
                guard.call(phase, session.end_phase)
            if finally_ is not None:
                guard.call(phase or "scope", finally_, result)
        return result

    return hooked


class _Observer:
    """The hooks of one worker."""

    def __init__(self, worker: Any, session: Session) -> None:
        self._worker, self._session = worker, session
        self._numbers = LayerNumbers()
        self._startup, self._loading = _Patches(), _Patches()

    def attach(self) -> None:
        """Put the hooks on; they come off when the session ends."""
        worker, session = self._worker, self._session
        session.at_end += [self._loading.undo, self._startup.undo]
        for phase, method in (
            (None, "load_model"),
            ("profile", "determine_available_memory"),
            ("kv_cache", "initialize_from_config"),
            ("warmup", "compile_or_warm_up_model"),
        ):
            hooked = _phase(
                phase,  # type: ignore[arg-type]
                getattr(worker, method),
                session,
                scope=True,
                finally_={"load_model": self._loaded, "compile_or_warm_up_model": self._ready}.get(method),
            )
            self._startup.set(worker, method, hooked)
        for module, name, reset in wrap_resets(lambda: session.guard.call("reset", session.before_reset)):
            self._startup.set(module, name, reset)
        self._hook_loaders()

    def _hook_loaders(self) -> None:
        """Replace the loader functions wherever a module of vLLM holds them by name."""
        session = self._session
        package = importlib.import_module(_LOADER)
        base = importlib.import_module(_LOADER + ".base_loader")
        get_loader = package.get_model_loader

        @functools.wraps(get_loader)
        def get_model_loader(*args: Any, **kwargs: Any) -> Any:
            loader = get_loader(*args, **kwargs)
            session.guard.call("get_model_loader", self._hook_load_weights, loader)
            return loader

        self._replace("get_model_loader", get_loader, get_model_loader)
        create = base.initialize_model
        self._replace(
            "initialize_model",
            create,
            _phase("create_model", create, session, finally_=self._created),
            # Models that build others inside themselves take it from here, within the phase.
            leave=_LOADER + ".utils",
        )
        process = base.process_weights_after_loading
        self._replace(
            "process_weights_after_loading",
            process,
            _phase("process_weights", process, session),
            leave=_LOADER + ".utils",
        )

    def _replace(self, name: str, original: Any, replacement: Any, leave: str | None = None) -> None:
        """Put a function in place of another wherever a module of vLLM has it by name.

        Modules that are imported while the engine loads take the replacement by name too, so the way
        back looks at all of them again.
        """
        _swap(name, original, replacement, leave)
        self._session.at_end.append(lambda: _swap(name, replacement, original))

    def _hook_load_weights(self, loader: Any) -> None:
        if "load_weights" not in vars(loader):
            self._loading.set(
                loader, "load_weights", _phase("load_weights", loader.load_weights, self._session)
            )

    def _created(self, model: Any) -> None:
        """A model exists: hook the conversion of each of its quantized modules."""
        if model is None:
            return
        base = importlib.import_module("vllm.model_executor.layers.quantization.base_config")
        converted = [
            (module, name, module.quant_method)
            for name, module in model.named_modules()
            if isinstance(getattr(module, "quant_method", None), base.QuantizeMethodBase)
        ]
        layers, moe_layers = self._numbers.add_model(
            NamedModule(id(module), name, _is_moe(method), not _is_a(method, "BaseKVCacheMethod"))
            for module, name, method in converted
        )
        self._session.model(layers, moe_layers, len(converted))
        for _, _, method in converted:
            if "process_weights_after_loading" not in vars(method):
                self._session.guard.call("hook_conversion", self._hook_conversion, method)

    def _hook_conversion(self, method: Any) -> None:
        """Watch one quantization method object, which several modules may share."""
        original = method.process_weights_after_loading
        session = self._session
        guard = session.guard

        @functools.wraps(original)
        def process_weights_after_loading(layer: Any, *args: Any, **kwargs: Any) -> Any:
            watch = guard.call("conversion", session.start_conversion)
            if watch is None:
                return original(layer, *args, **kwargs)
            try:
                result = original(layer, *args, **kwargs)
            except BaseException:
                guard.call("conversion", self._converted, watch, layer, method, failed=True)
                raise
            guard.call("conversion", self._converted, watch, layer, method)
            return result

        self._loading.set(method, "process_weights_after_loading", process_weights_after_loading)

    def _converted(self, watch: ConversionWatch, layer: Any, method: Any, failed: bool = False) -> None:
        name, number = self._numbers.identify(id(layer))
        kind = type(method)
        self._session.end_conversion(
            watch,
            name=name or type(layer).__qualname__,
            method=f"{kind.__module__}.{kind.__qualname__}",
            moe=_is_moe(method),
            layer=number,
            layer_done=not failed and self._numbers.finished(id(layer)),
            failed=failed,
        )

    def _loaded(self, _: Any) -> None:
        """The model is loaded, or its loading failed: no conversion is watched any more."""
        self._loading.undo()

    def _ready(self, _: Any) -> None:
        """Warm-up has returned; after an error the session has ended already."""
        if self._session.outcome == "loading":
            self._session.ready()


def _swap(name: str, old: Any, new: Any, leave: str | None = None) -> None:
    # A copy in one step: other threads may be importing.
    for module_name, module in sys.modules.copy().items():
        if (
            module_name.startswith("vllm")
            and module_name != leave
            and isinstance(module, ModuleType)
            and vars(module).get(name) is old
        ):
            setattr(module, name, new)


def _is_moe(method: Any) -> bool:
    """Whether a quantization method serves a fused mixture of experts."""
    return _is_a(method, "FusedMoEMethodBase")


def _is_a(method: Any, kind: str) -> bool:
    """Whether a class of this name is among a method's own; where it lives differs between versions."""
    return any(base.__name__ == kind for base in type(method).__mro__)
