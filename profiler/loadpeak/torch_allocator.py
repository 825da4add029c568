"""Read PyTorch's CUDA caching allocator. Only the modules ``torch_*`` name torch.

Statistics are kept on the host, so reading them neither waits for the device nor allocates on it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loadpeak.allocator.settings import after_setter, conf_string
from loadpeak.record import Memory

if TYPE_CHECKING:
    from loadpeak.guard import Guard

RESET_FUNCTIONS = (
    ("torch.cuda", "reset_peak_memory_stats"),
    ("torch.cuda.memory", "reset_peak_memory_stats"),
    ("torch.accelerator", "reset_peak_memory_stats"),
    ("torch.accelerator.memory", "reset_peak_memory_stats"),
)
"""Names under which vLLM and others reset the peaks that loadpeak also reads."""
SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
"""Names of the setter of allocator settings in ``torch._C``: since 2.9, and before."""


class TorchAllocator:
    """The allocator of the current CUDA device of this process.

    Without CUDA every reading is missing and :meth:`release` does nothing.
    """

    def __init__(self, device_index: int | None = None) -> None:
        """Read the device with this index, or the current one."""
        self._device_index = device_index
        self._followed: str | None = None

    def _device(self) -> Any:
        """The torch module and the device index, or nothing before CUDA is in use."""
        import torch

        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return None
        return self._device_index if self._device_index is not None else torch.cuda.current_device()

    def read(self) -> Memory:
        """Current figures, and peaks since the last reset; all missing where there is no CUDA."""
        import torch

        device = self._device()
        if device is None:
            return Memory()
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
        if not stats:
            return Memory()
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]
        return Memory(
            allocated_bytes=allocated["current"],
            reserved_bytes=reserved["current"],
            inactive_split_bytes=stats["inactive_split_bytes"]["all"]["current"],
            allocated_peak_bytes=allocated["peak"],
            reserved_peak_bytes=reserved["peak"],
            retries=stats["num_alloc_retries"],
            ooms=stats["num_ooms"],
        )

    def reset_peaks(self) -> None:
        """Start a new window for the peaks."""
        import torch

        device = self._device()
        if device is not None:
            # Past our own wrapper around reset_peak_memory_stats, which is for other people's resets.
            torch._C._cuda_resetPeakMemoryStats(device)

    def release(self) -> None:
        """Give unused cached blocks back to the device (``torch.cuda.empty_cache``)."""
        import torch

        if self._device() is not None:
            torch.cuda.empty_cache()

    def settings(self) -> str | None:
        """The allocator settings in force, as a conf string in PyTorch's own syntax.

        From PyTorch's own getter where it has one (2.12 and later), else from the allocator's snapshot,
        which tells what is in force after a change at run time. Missing without CUDA.
        """
        import torch

        if self._followed is not None:
            return self._followed
        if self._device() is None:
            return None
        getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        if getter is not None:
            return str(getter())
        return conf_string(torch._C._cuda_memorySnapshot(None)["allocator_settings"])

    def follow_settings(self, on_change: Callable[[str], None], guard: Guard) -> Callable[[], None]:
        """Know the settings from the calls that change them, and tell each change.

        Reading them from the allocator's snapshot takes longer with every event of a history that is being
        recorded.

        Args:
            on_change: told the settings in force after each change.
            guard: keeps our failures from whoever changes them.

        Returns:
            Puts PyTorch's setter back as it was; from then on the settings are read again.
        """
        import torch

        self._followed = self.settings() or ""
        originals = {name: getattr(torch._C, name) for name in SETTERS if hasattr(torch._C, name)}

        def changed(call: str) -> None:
            self._followed = after_setter(self._followed or "", call)
            on_change(self._followed)

        def follow(original: Callable[[str], Any], call: str) -> Any:
            result = original(call)
            guard.call("settings", changed, call)
            return result

        def stop() -> None:
            self._followed = None
            for name, original in originals.items():
                setattr(torch._C, name, original)

        for name, original in originals.items():
            setattr(torch._C, name, functools.partial(follow, original))
        return stop

    def device_uuid(self) -> str | None:
        """``GPU-…`` of the device in use; missing without CUDA or on a torch that does not tell."""
        import torch

        device = self._device()
        if device is None:
            return None
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"

    def device_name(self) -> str | None:
        """The device's product name; missing without CUDA."""
        import torch

        device = self._device()
        return None if device is None else str(torch.cuda.get_device_name(device))


def environment_conf(environ: dict[str, str] | None = None) -> str | None:
    """The allocator settings that the process was started with; the newer name wins, as in PyTorch."""
    environ = dict(os.environ) if environ is None else environ
    return environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF")


def torch_version() -> str | None:
    """Version of the torch in this process."""
    import torch

    return str(torch.__version__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that device memory ran out, in PyTorch's or CUDA's words."""
    import torch

    kinds: tuple[type[BaseException], ...] = tuple(
        kind
        for kind in (getattr(torch, "OutOfMemoryError", None), getattr(torch.cuda, "OutOfMemoryError", None))
        if isinstance(kind, type)
    )
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def wrap_resets(before: Callable[[], None]) -> list[tuple[Any, str, Any]]:
    """Functions that reset peak statistics, wrapped so that ``before`` runs first.

    Returns:
        ``(module, name, wrapped function)`` for every name that exists in this torch.
    """
    import importlib

    wrapped: dict[int, Any] = {}
    places: list[tuple[Any, str, Any]] = []
    for module_name, name in RESET_FUNCTIONS:
        try:
            module = importlib.import_module(module_name)
            original = getattr(module, name)
        except (ImportError, AttributeError):
            continue
        if id(original) not in wrapped:

            def reset(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                before()
                return _original(*args, **kwargs)

            wrapped[id(original)] = functools.wraps(original)(reset)
        places.append((module, name, wrapped[id(original)]))
    return places
