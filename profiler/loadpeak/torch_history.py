"""Record PyTorch's own history of its caching allocator.

The history is a ring of so many events, without stacks, in the process's memory. Snapshots hold all of it, so
none is taken before the end.
"""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path


def start(entries_limit: int) -> None:
    """Keep the newest so many events from now on, on every device of this process."""
    import torch

    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=entries_limit
    )


def write(path: Path) -> None:
    """Write what was kept, in one step.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    temporary = path.with_name(f".{path.name}")
    with gzip.open(temporary, "wb", compresslevel=1) as file:
        pickle.dump(torch.cuda.memory._snapshot(), file, protocol=pickle.HIGHEST_PROTOCOL)
    temporary.replace(path)


def stop() -> None:
    """Keep no events any more, and drop those that were kept."""
    import torch

    torch.cuda.memory._record_memory_history(enabled=None)
