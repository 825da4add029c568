"""vLLM calls :func:`register` in each of its processes, through ``vllm.general_plugins``.

It may be called in processes that never load a model and more than once, so it only installs a hook
that fires where a worker initializes its device. Helpers and servers start from there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from loadpeak import settings, vllm_adapter
from loadpeak.guard import Guard

if TYPE_CHECKING:
    from loadpeak.session import Session
    from loadpeak.vllm_worker import Worker

logger = logging.getLogger("loadpeak")


def register() -> None:
    """Watch every worker that starts in this process, unless ``LOADPEAK_DISABLE=1``."""
    guard = Guard()
    guard.call("register", _register, guard)


def _register(guard: Guard) -> None:
    found = settings.load()
    if found.disabled:
        return
    vllm_adapter.when_worker_starts(_begin, guard)
    if found.outputs is not None:
        from loadpeak import vllm_outputs

        vllm_outputs.record_outputs(found.outputs, guard)


def _begin(worker: Worker) -> Session | None:
    """Start recording a worker, unless the environment has come to say no since the process began."""
    from loadpeak.recording import Recording

    _log_to_standard_error()
    found = settings.load()
    if found.disabled:
        return None
    for problem in found.problems:
        logger.warning("%s; the default is used", problem)
    return Recording(worker, found, Guard()).session


def _log_to_standard_error() -> None:
    """Print our few messages whatever the engine does with the root logger, unless somebody set ours up."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("loadpeak %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
