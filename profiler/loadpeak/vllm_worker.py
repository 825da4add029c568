"""What loadpeak reads of a vLLM worker: its place, its configuration, its models (0.26 to 0.32, and forks).

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Any

_SPLIT_SCOPE = "_scoped_allocator_max_split"
_CONFIGS = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "device_config",
    "load_config",
    "lora_config",
    "speculative_config",
    "compilation_config",
    "attention_config",
    "kernel_config",
    "kv_transfer_config",
    "quant_config",
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the text of an object that has none of its own."""
_OWN = re.compile(
    # One process's own: ids, addresses, ports, places for temporary files.
    r"(^|[._])((instance|engine|replica|request)_id|uuid|ip|host|addr|address|socket|cache_dir|cache_root)$"
    r"|(^|_)(ip|port|port_list)$|^parallel_config\..*rank"
    r"|^VLLM_\w*(RANK|PORT|PATH|IP|ROOT|ID|DIR|IDENT|BUFFER_NAME)$"
    # Measured while the engine starts.
    r"|\.(num_[gc]pu_blocks|kv_cache_size_tokens|kv_cache_max_concurrency|compilation_time|traced_files)$"
    r"|\.static_\w*context"
    # Nobody else's business.
    r"|(^|[._])(hf_token|api_key|auth_token|secret|password)$|(API_KEY|TOKEN|SECRET|PASSWORD)$"
)
"""Names of settings that say nothing about what the engine does."""


class Worker:
    """What loadpeak needs of one vLLM worker and its configuration.

    It holds neither: an engine that its owner drops must be freed, with the memory of its model.
    """

    def __init__(self, worker: Any, config: Any) -> None:
        self._worker = weakref.ref(worker)

        def get(path: str) -> Any:
            value = config
            for name in path.split("."):
                value = getattr(value, name, None)
            return value

        world_size = get("parallel_config.world_size") or 1
        self.rank = int((get("parallel_config.data_parallel_rank") or 0) * world_size + worker.rank)
        """Number among all workers of the start, data-parallel ones included."""
        self.local_rank = int(worker.local_rank)
        """Device index on the host, before vLLM adds data-parallel offsets."""
        first = self.local_rank == 0 or world_size == 1
        self.first_on_host = first and not get("parallel_config.data_parallel_rank_local")
        """Whether this worker speaks for the others on its host."""
        pooled = get("model_config.enable_cumem_allocator")
        pooled = get("model_config.enable_sleep_mode") if pooled is None else pooled
        self.memory_pool = "cumem" if pooled else None
        """The private pool that weights are loaded into (sleep mode): a cache release has no effect there."""
        self.facts = _facts(get, world_size)
        """Fields of the run's header that vLLM knows; what it does not tell is missing."""

    def keep_split_limit(self, loading: Callable[[], bool]) -> bool:
        """Leave out vLLM's scoped ``max_split_size_mb`` while ``loading`` says so.

        Returns:
            False where this vLLM has no such scope.
        """
        worker = self._worker()
        scope = getattr(worker, _SPLIT_SCOPE, None)
        if scope is None:
            return False

        @functools.wraps(scope)
        def unless_loading(*args: Any, **kwargs: Any) -> Any:
            return nullcontext() if loading() else scope(*args, **kwargs)

        setattr(worker, _SPLIT_SCOPE, unless_loading)
        return True

    def restore_split_limit(self) -> None:
        """Undo :meth:`keep_split_limit`."""
        worker = self._worker()
        if worker is not None:
            vars(worker).pop(_SPLIT_SCOPE, None)

    def models(self) -> dict[str, Any]:
        """The worker's loaded models by a prefix for their names: its own without one, then a draft model."""
        runner = getattr(self._worker(), "model_runner", None)
        models = {"": runner.get_model()} if runner is not None else {}
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        draft = getattr(drafter, "model", None)
        if hasattr(draft, "named_modules"):
            models["draft."] = draft
        return models

    def settings(self) -> dict[str, str]:
        """The engine's effective settings by their paths in the configuration, and vLLM's variables."""
        config = getattr(self._worker(), "vllm_config", None)
        found: dict[str, str] = {}
        for part in _CONFIGS:
            _flatten(part, getattr(config, part, None), found)
        found |= {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        return {name: value for name, value in sorted(found.items()) if not _OWN.search(name)}


def _flatten(path: str, value: Any, found: dict[str, str]) -> None:
    """Plain values and lists of them under their paths; other objects are left out."""
    if path == "quant_config" and value is not None:
        found[path] = type(value).__name__
        for name, inner in vars(value).items():
            _flatten(f"{path}.{name}", inner, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _flatten(f"{path}.{field.name}", getattr(value, field.name, None), found)
    elif isinstance(value, dict):
        for key in value:
            _flatten(f"{path}.{key}", value[key], found)
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = [str(item) for item in value if not _ADDRESS.search(str(item))]
        found[path] = str(sorted(items) if isinstance(value, (set, frozenset)) else items)
    elif value is None or isinstance(value, (bool, int, float, str, Enum)) or _is_type(value):
        found[path] = str(value)


def _is_type(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device")


def _facts(get: Callable[[str], Any], world_size: int) -> dict[str, Any]:
    load_format = get("load_config.load_format")
    return {
        "engine": "vllm",
        "engine_version": getattr(sys.modules.get("vllm"), "__version__", None),
        # Data-parallel engines of one start get an id each, told apart by this suffix.
        "engine_instance": re.sub(r"_dp\d+$", "", get("instance_id") or "") or None,
        "model": get("model_config.model"),
        "quantization": get("model_config.quantization"),
        "load_format": None if load_format is None else str(load_format),
        "tp_size": get("parallel_config.tensor_parallel_size"),
        "world_size": world_size * (get("parallel_config.data_parallel_size") or 1),
    }
