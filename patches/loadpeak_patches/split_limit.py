"""Leave the allocator's own split limit in force while vLLM loads (``LOADPEAK_SPLIT_LIMIT=keep``).

vLLM loads under ``max_split_size_mb:20`` since 0.26 (``Worker._scoped_allocator_max_split``). With
expandable segments a freed block of 20 MiB or more may then no longer serve a smaller request, so each
layer maps new memory. Without expandable segments that limit was put there for a reason (vLLM pull
request 41268): measure before keeping it away.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadpeak.recording import Recording

LOADING = ("init_device", "create_model", "load_weights", "process_weights")
"""While one of these is the last phase that began, vLLM's scope is left out; later ones are not loading."""

logger = logging.getLogger("loadpeak")


def attach(recording: Recording) -> None:
    """Leave out the scope on a worker if asked to, or say why that is inactive."""
    session, text, worker = recording.session, recording.settings.split_limit, recording.worker
    if text != "keep":
        return

    def activate() -> None:
        obstacle = None
        if session.allocator.read().reserved_bytes is None:
            obstacle = "this process has no CUDA caching allocator"
        elif not worker.keep_split_limit(lambda: session.phase in LOADING):
            obstacle = "this vLLM does not change the split limit while it loads"
        else:
            session.at_end.append(worker.restore_split_limit)
        if obstacle is not None:
            logger.warning("the split limit setting keep is inactive: %s", obstacle)
        session.fix("split_limit", text, active=obstacle is None, detail=obstacle or "")

    session.after_init_device.append(activate)
