"""What an experiment is judged by: the engine's effective settings, and hashes of all prepared weights.

Both are read when the engine is ready (``LOADPEAK_EVIDENCE=on``). Hashing needs device memory of its own, so
it waits until the sampler of the device has ended: it can be part of no peak and of no loading time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loadpeak import torch_hashes
from loadpeak.record import EngineSettings, WeightHashes, WeightsHashed

if TYPE_CHECKING:
    from loadpeak.recording import Recording

SAMPLER_END_SECONDS = 60.0
"""A sampler that has not ended so long after it was told to is stuck; nothing is hashed then."""
LINE_HASHES = 1000
"""At most so many hashes stand in one line."""
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def attach(recording: Recording) -> None:
    """Take the evidence of a worker when it is ready, if asked to."""
    if not recording.settings.evidence or recording.folder is None:
        return

    def take() -> None:
        if recording.session.outcome == "ready":
            recording.guard.call("engine_settings", write_settings, recording)
            recording.guard.call("weight_hashes", write_hashes, recording)

    # Last of all that happens at the end: an allocator history must not hold what hashing allocates.
    recording.session.after_init_device.append(lambda: recording.session.at_end.append(take))


def write_settings(recording: Recording) -> None:
    """One line with the engine's settings."""
    session = recording.session
    session.write(EngineSettings(at_seconds=session.clock(), settings=recording.worker.settings()))


def write_hashes(recording: Recording) -> None:
    """Lines with all hashes, and one that says they are complete.

    Raises:
        RuntimeError: the sampler goes on reading the device.
    """
    if not recording.sampler_ended(SAMPLER_END_SECONDS):
        raise RuntimeError("the device sampler did not end; hashing would be part of the peak")
    session = recording.session
    began = session.clock()
    size = 0
    hashes: dict[str, dict[str, str]] = {}
    not_hashed: dict[str, str] = {}
    hasher = torch_hashes.Hasher()
    for name, tensor in _tensors(recording.worker.models()):
        try:
            digest = hasher.hash(tensor)
        except Exception as error:  # noqa: BLE001 - one odd tensor must not cost the hashes of all others
            not_hashed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        match = _LAYER.match(name)
        hashes.setdefault(match[1] if match else "", {})[name] = digest
        size += tensor.numel() * tensor.element_size()
    for module, group in hashes.items():
        names = list(group)
        for start in range(0, len(names), LINE_HASHES):
            some = {name: group[name] for name in names[start : start + LINE_HASHES]}
            session.write(WeightHashes(at_seconds=session.clock(), module=module, hashes=some))
    session.write(
        WeightsHashed(
            at_seconds=session.clock(),
            tensors=sum(map(len, hashes.values())),
            size_bytes=size,
            duration_seconds=round(session.clock() - began, 6),
            not_hashed=not_hashed,
        )
    )


def _tensors(models: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for prefix, model in models.items():
        for name, tensor in torch_hashes.named_tensors(model):
            yield prefix + name, tensor
