"""What the SM70 AWQ MoE loader allocates and frees, in plain PyTorch, recorded as loadpeak records vLLM.

    python -m benchmarks.awq_lifecycle FOLDER [--cap-gib 32] [--release moe-layer] [--history 2000000]

All layers are created, then converted one by one: expert by expert the packed weights are unpacked, put into
the kernel's order and packed again, the results are stacked, and the sources are dropped. Writes the journal
of a rank, and with ``--history`` the allocator's history, into FOLDER.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.startup import cap
from loadpeak import memory_history, run_folder
from loadpeak.guard import Guard
from loadpeak.journal import Journal
from loadpeak.record import RankStart
from loadpeak.session import Session
from loadpeak.torch_allocator import TorchAllocator, is_out_of_memory
from loadpeak_patches.policies import parse
from loadpeak_patches.release import CacheRelease

EXPERTS, HIDDEN, INTERMEDIATE, GROUP = 256, 3072, 256, 128
Weights = dict[str, Any]


def create(torch: Any) -> Weights:
    """The source weights of one layer, as the checkpoint has them: eight 4-bit weights an int32."""

    def packed(rows: int, columns: int) -> Any:
        return torch.zeros(EXPERTS, rows, columns // 8, dtype=torch.int32, device="cuda")

    def scales(rows: int, columns: int) -> Any:
        return torch.zeros(EXPERTS, rows // GROUP, columns, dtype=torch.float16, device="cuda")

    wide = 2 * INTERMEDIATE
    return {
        "w13": packed(HIDDEN, wide),
        "w2": packed(INTERMEDIATE, HIDDEN),
        "w13_scales": scales(HIDDEN, wide),
        "w13_zeros": packed(HIDDEN // GROUP, wide),
        "w2_scales": scales(INTERMEDIATE, HIDDEN),
        "w2_zeros": packed(INTERMEDIATE // GROUP, HIDDEN),
    }


def repack(torch: Any, packed: Any) -> Any:
    """One expert's packed weights in another order: unpacked, transposed, packed again."""
    shifts = torch.arange(0, 32, 4, device="cuda", dtype=torch.int32)
    unpacked = ((packed.unsqueeze(-1) >> shifts) & 15).to(torch.int16).reshape(packed.shape[0], -1)
    ordered = unpacked.to(torch.uint8).t().contiguous()
    pairs = (ordered[:, 0::2] | (ordered[:, 1::2] << 4)).contiguous()
    return pairs.view(torch.int32)


def convert(torch: Any, weights: Weights) -> None:
    """Replace the source weights of a layer by what the kernel reads."""
    for name in ("w13", "w2"):
        source = weights[name]
        experts, scales = [], []
        for expert in range(EXPERTS):
            experts.append(repack(torch, source[expert]))
            pair = (
                weights[f"{name}_scales"][expert].t().contiguous(),
                weights[f"{name}_zeros"][expert].clone(),
            )
            scales.append(pair)
        weights[f"{name}_kernel"] = torch.stack(experts)
        weights[f"{name}_kernel_scales"] = torch.stack([scale for scale, _ in scales])
        weights[f"{name}_kernel_zeros"] = torch.stack([zero for _, zero in scales])
    for name in [name for name in weights if "kernel" not in name]:
        del weights[name]


def run(arguments: argparse.Namespace) -> None:
    """One startup: phases and conversions as in vLLM."""
    import torch

    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.zeros(1, device="cuda")
    cap(arguments.cap_gib)
    journal = Journal(run_folder.journal_path(arguments.folder, 0))
    allocator, guard = TorchAllocator(), Guard()
    session = Session(allocator, journal.append, is_out_of_memory=is_out_of_memory, guard=guard)
    start = RankStart(at_seconds=time.monotonic(), at_wall_seconds=time.time(), rank=0, local_rank=0, pid=0)
    session.write(start)
    recording = SimpleNamespace(
        session=session,
        settings=SimpleNamespace(memory_history=arguments.history),
        folder=arguments.folder,
        worker=SimpleNamespace(rank=0),
        guard=guard,
    )
    memory_history.attach(cast(Any, recording), allocator)
    if arguments.release != "off":
        CacheRelease(session, parse(arguments.release)).apply()
        session.fix("release", arguments.release, active=True)
    try:
        _load(torch, session, arguments.layers)
    except torch.OutOfMemoryError as error:
        session.failed(error)
        return
    session.ready()


def _load(torch: Any, session: Session, count: int) -> None:
    session.start_phase("init_device")
    session.end_phase()
    session.start_phase("load_weights")
    layers = [create(torch) for _ in range(count)]
    session.end_phase()
    session.model(range(count), range(count), count)
    session.start_phase("process_weights")
    for number, weights in enumerate(layers):
        watch = session.start_conversion()
        convert(torch, weights)
        session.end_conversion(
            watch,
            name=f"layers.{number}.experts",
            method="benchmarks.awq_lifecycle.FusedMoE",
            moe=True,
            layer=number,
            layer_done=True,
        )
    session.end_phase()


def main() -> None:
    """One startup in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--release", default="off")
    parser.add_argument("--history", type=int, help="record the allocator's history, so many events")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
