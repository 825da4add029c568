"""Release unused cached blocks after a layer's conversion, when the policy asks for it.

The session calls the release when an outermost conversion has returned, so it never runs inside one,
never after an error and never once the model is loaded: the hooks are gone by then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from loadpeak_patches import policies

if TYPE_CHECKING:
    from loadpeak.record import Memory
    from loadpeak.recording import Recording
    from loadpeak.session import ConvertedModule, Session
    from loadpeak_patches.policies import Policy

logger = logging.getLogger("loadpeak")


class CacheRelease:
    """The release on one session; applying it twice is the same as once, and it can be removed."""

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy

    def apply(self) -> None:
        """Release from now on."""
        if self._after_conversion not in self._session.after_conversion:
            self._session.after_conversion.append(self._after_conversion)

    def remove(self) -> None:
        """Release no more."""
        if self._after_conversion in self._session.after_conversion:
            self._session.after_conversion.remove(self._after_conversion)

    def _after_conversion(self, module: ConvertedModule, memory: Memory) -> bool:
        wanted = self._policy.wants(module, memory)
        if wanted:
            self._session.allocator.release()
        return wanted


def attach(recording: Recording) -> None:
    """Apply the policy of ``LOADPEAK_CACHE_RELEASE`` to a worker, or say why it is inactive."""
    session, text = recording.session, recording.settings.cache_release
    policy = policies.parse(text)
    if policy.name == "off":
        return

    def activate() -> None:
        obstacle = _obstacle(recording)
        if obstacle is None:
            CacheRelease(session, policy).apply()
        else:
            logger.warning("the cache release %s is inactive: %s", text, obstacle)
        session.fix("release", text, active=obstacle is None, detail=obstacle or "")

    session.after_init_device.append(activate)


def _obstacle(recording: Recording) -> str | None:
    """Why a release would do nothing here, if so."""
    if recording.session.allocator.read().reserved_bytes is None:
        return "this process has no CUDA caching allocator"
    if recording.worker.memory_pool is not None:
        return (
            f"weights are loaded into the {recording.worker.memory_pool} pool of sleep mode, "
            "whose blocks the allocator cannot give back"
        )
    return None
