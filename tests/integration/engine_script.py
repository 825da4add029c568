"""``python engine_script.py MODEL SCENARIOS``: start vLLM engines in this process, one after another.

``SCENARIOS`` is a JSON list of ``{"env": {}, "llm": {}, "sabotage": null}``. Prints one JSON line per
scenario: the generated token ids or the error, and how vLLM looked afterwards. Runs in the vLLM
environment of the integration tests.
"""

import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
from engine_names import OOM, OTHER

PROMPT = "hello"


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute replaced for a while, as faults do from outside."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def moe_method() -> Any:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return UnquantizedFusedMoEMethod


def third_layer(action: Callable[[], None]) -> Any:
    """Do something in the middle of the third MoE layer's conversion."""
    seen = 0

    def wrap(original: Any) -> Any:
        def process_weights_after_loading(method: Any, layer: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == 3:
                action()
            original(method, layer)

        return process_weights_after_loading

    return replaced(moe_method(), "process_weights_after_loading", wrap)


def raise_oom() -> None:
    raise torch.OutOfMemoryError(OOM)


def raise_other() -> None:
    raise ValueError(OTHER)


def hang() -> None:
    print("HANGING", flush=True)
    time.sleep(120)


def kill_sampler() -> None:
    """Kill the sampler of this process: its only child that is one."""
    samplers = [child for child in psutil.Process().children() if "loadpeak.sampler" in child.cmdline()]
    assert len(samplers) == 1, samplers
    samplers[0].kill()
    time.sleep(0.2)


@contextmanager
def int8_experts() -> Iterator[None]:
    """Int8 experts on any CPU: vLLM's own kernel needs AMX tiles, so its three calls are stood in for.

    Everything before it, which quantizes the experts while weights load, is vLLM's.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

    def pack(_: Any) -> Any:
        def process_weights_after_loading(experts: Any, layer: Any) -> None:
            for name in ("w13_weight", "w2_weight"):
                weight = getattr(layer, name)
                setattr(layer, name, torch.nn.Parameter(weight.clone(), requires_grad=False))

        return process_weights_after_loading

    def compute(_: Any) -> Any:
        def apply(experts: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            output.zero_()

        return apply

    with (
        replaced(CPUExpertsInt8, "_supports_current_device", lambda _: staticmethod(lambda: True)),
        replaced(CPUExpertsInt8, "process_weights_after_loading", pack),
        replaced(CPUExpertsInt8, "apply", compute),
    ):
        yield


SABOTAGE: dict[str | None, Callable[[], Any]] = {
    None: nullcontext,
    "oom_in_layer": lambda: third_layer(raise_oom),
    "error_in_layer": lambda: third_layer(raise_other),
    "hang_in_layer": lambda: third_layer(hang),
    "kill_sampler": lambda: third_layer(kill_sampler),
    "int8_experts": int8_experts,
}


def worker_of(llm: Any) -> Any:
    """The worker of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def in_process(llm: Any) -> bool:
    """Whether the engine's worker is in this process."""
    return hasattr(llm.llm_engine.engine_core, "engine_core")


def leftovers(llm: Any) -> list[str]:
    """What loadpeak still has on vLLM: on the worker, on quantization methods, in modules."""
    worker = worker_of(llm)
    names = [name for name in vars(worker) if name in ("load_model", "determine_available_memory")]
    for _, module in worker.get_model().named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and "process_weights_after_loading" in vars(method):
            names.append(type(method).__name__)
    hooked = ("get_model_loader", "initialize_model", "process_weights_after_loading")
    for module_name, found in list(sys.modules.items()):
        if module_name.startswith("vllm"):
            for name in hooked:
                if "loadpeak" in str(getattr(vars(found).get(name), "__code__", "")):
                    names.append(f"{module_name}.{name}")
    return names


def use(llm: Any, scenario: dict[str, Any]) -> dict[str, Any]:
    """What a ready engine says and how it looks."""
    from vllm import SamplingParams

    result: dict[str, Any] = {"ready": True}
    if in_process(llm):
        result["leftovers"] = leftovers(llm)
    if scenario.get("generate", True):
        output = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
        result["tokens"] = list(output[0].outputs[0].token_ids)
    if scenario.get("wait"):
        print("SERVING", flush=True)
        sys.stdin.readline()
    return result


def run(model: str, scenario: dict[str, Any]) -> dict[str, Any]:
    """One engine from start to end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    environ = dict(os.environ)
    os.environ.update(scenario.get("env", {}))
    arguments = {
        "model": model,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "dtype": "bfloat16",
        "distributed_executor_backend": "uni",
        **scenario.get("llm", {}),
    }
    try:
        with SABOTAGE[scenario.get("sabotage")]():
            llm = LLM(**arguments)
        result = use(llm, scenario)
        weights = weakref.ref(worker_of(llm).get_model() if in_process(llm) else llm)
        del llm
    except Exception as error:  # noqa: BLE001 - the error is the result
        return {"ready": False, "error": type(error).__name__, "message": str(error)}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
        os.environ.clear()
        os.environ.update(environ)
    gc.collect()
    return {**result, "freed": weights() is None}


if __name__ == "__main__":
    for entry in json.loads(sys.argv[2]):
        print("RESULT " + json.dumps(run(sys.argv[1], entry)), flush=True)
