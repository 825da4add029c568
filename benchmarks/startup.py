"""Start one vLLM engine in this process and print its figures as one JSON line.

    python -m benchmarks.startup CONFIG_JSON [--cap-gib 32] [--random]

CONFIG_JSON is a model's ``config.json``; weights are vLLM's dummy weights, which ``--random`` sets to random
contents, the same in every process. ``--cap-gib`` caps the allocator (``set_per_process_memory_fraction``),
so that a large card stands in for a smaller one; the engine therefore runs in this process. Settings of
loadpeak and of the allocator come from the environment, as in production.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import random_weights

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

MIB = 1 << 20


def model_folder(config: Path) -> Path:
    """A model folder with this configuration and nothing else, named after it; the same for every start."""
    folder = Path(tempfile.gettempdir(), "loadpeak-models", config.name.removesuffix(".config.json"))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, folder / "config.json")
    return folder


def cap(gib: float | None) -> None:
    """Let the caching allocator have so much of the device and no more."""
    if gib is None:
        return
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * (1 << 30) / total, 0)


def start(folder: Path, **options: Any) -> Any:
    """An offline engine, eager, one sequence, ready to serve."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        **{
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "attention_backend": "TRITON_ATTN",
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 1,
            "kv_cache_memory_bytes": 512 * MIB,
            **options,
        },
    )


def worker_of(llm: Any) -> Any:
    """The worker object inside the in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def tokens(llm: Any, prompts: int = 1, tampered: bool = False) -> list[int]:
    """Greedy tokens for fixed prompts, one after the other; the last prompt's last token may be another.

    Random weights repeat two tokens for ever and never end a text. So repetition costs, and every eighth
    token of the vocabulary is an end.
    """
    from vllm import SamplingParams

    ends = list(range(0, llm.model_config.get_vocab_size(), 8))
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, max_tokens=128, stop_token_ids=ends, detokenize=False
    )
    asked = [list(range(start, start + 32)) for start in range(100, 100 + prompts)]
    if tampered:
        asked[-1][-1] += 1
    done = llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    return [token for request in done for token in request.outputs[0].token_ids]


def close() -> None:
    """Give everything back, so that another engine can start in this process."""
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """One startup."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--cap-gib", type=float)
    parser.add_argument("--prompts", type=int, default=1, help="how many prompts are answered")
    parser.add_argument("--random", action="store_true", help="random weights, the same in every process")
    parser.add_argument(
        "--tamper", action="append", default=[], help="VARIANT=weight or VARIANT=token: what it has other"
    )
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON for LLM(); repeat it")
    arguments = parser.parse_args()
    tampered = dict(text.split("=") for text in arguments.tamper).get(os.environ.get("LOADPEAK_VARIANT"))
    options = {
        name: json.loads(value) for name, _, value in (text.partition("=") for text in arguments.option)
    }
    folder = model_folder(arguments.config)
    try:
        import torch

        cap(arguments.cap_gib)
        if arguments.random:
            random_weights.install(flip=tampered == "weight")
        begun = time.monotonic()
        llm = start(folder, **options)
        seconds = time.monotonic() - begun
        stats = torch.cuda.memory_stats()
        result = {
            "start_seconds": round(seconds, 3),
            "ready_allocated_bytes": stats["allocated_bytes.all.current"],
            "retries": stats["num_alloc_retries"],
            "tokens": tokens(llm, prompts=arguments.prompts, tampered=tampered == "token"),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
