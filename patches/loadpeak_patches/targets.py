"""The MoE loaders whose conversion is known to leave large blocks in the cache.

Each class converts the weights of one fused-MoE layer in ``process_weights_after_loading(layer)`` and
drops its source parameters before it returns, which is what makes the moment after it the right one
for a release. Read in vLLM 0.26.0 and 0.32.0, and in 1Cat-vLLM (``AWQSM70MoEMethod`` and its siblings
delete ``w13_*`` and ``w2_*`` at their end). A class that is not listed is still released after if it
derives from vLLM's ``FusedMoEMethodBase``.
"""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A loader class.

    Attributes:
        engine: ``vllm`` or ``1cat-vllm``.
        weights: the weight format it converts.
        module: where it is defined, below ``vllm.model_executor.layers``.
        name: the class, or nothing for every MoE method of the module.
    """

    engine: str
    weights: str
    module: str
    name: str | None

    @property
    def qualified_module(self) -> str:
        """The module's full name."""
        return f"vllm.model_executor.layers.{self.module}"


_COMPRESSED = "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"

TARGETS: tuple[Target, ...] = (
    Target("vllm", "AWQ", "quantization.auto_awq", "AutoAWQMoEMethod"),
    Target("vllm", "GPTQ", "quantization.auto_gptq", "AutoGPTQMoEMethod"),
    Target("vllm", "FP8", "quantization.fp8", "Fp8MoEMethod"),
    Target("vllm", "FP8 online", "quantization.online.fp8", "Fp8PerTensorOnlineMoEMethod"),
    Target("vllm", "FP8 online, blocks", "quantization.online.fp8", "Fp8PerBlockOnlineMoEMethod"),
    Target("vllm", "FP8 online, per token and channel", "quantization.online.fp8", "Fp8PtpcOnlineMoEMethod"),
    Target("vllm", "INT8 online", "quantization.online.int8", "Int8OnlineMoEMethod"),
    Target("vllm", "MXFP8 online", "quantization.online.mxfp8", "Mxfp8OnlineMoEMethod"),
    Target("vllm", "NVFP4 online", "quantization.online.nvfp4", "Nvfp4OnlineMoEMethod"),
    Target("vllm", "FP8 ModelOpt", "quantization.modelopt", "ModelOptFp8MoEMethod"),
    Target("vllm", "NVFP4 ModelOpt", "quantization.modelopt", "ModelOptNvFp4FusedMoE"),
    Target("vllm", "MXFP8 ModelOpt", "quantization.modelopt", "ModelOptMxFp8FusedMoE"),
    Target("vllm", "MXFP4", "quantization.mxfp4", "Mxfp4MoEMethod"),
    Target("vllm", "MXFP4 gpt-oss", "quantization.mxfp4", "GptOssMxfp4MoEMethod"),
    Target("vllm", "NVFP4 compressed", f"{_COMPRESSED}_w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    Target("vllm", "MXFP4 compressed", f"{_COMPRESSED}_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    Target("vllm", "FP8 compressed", f"{_COMPRESSED}_w8a8_fp8", "CompressedTensorsW8A8Fp8MoEMethod"),
    Target("vllm", "INT8 compressed", f"{_COMPRESSED}_w8a8_int8", "CompressedTensorsW8A8Int8MoEMethod"),
    Target("vllm", "INT4 compressed", f"{_COMPRESSED}_wna16", "CompressedTensorsWNA16MoEMethod"),
    Target("vllm", "unquantized", "fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    Target("1cat-vllm", "AWQ", "quantization.awq_sm70_moe", "AWQSM70MoEMethod"),
    Target("1cat-vllm", "FP8", "quantization.fp8_sm70_moe", "Fp8SM70MoEMethod"),
    Target("1cat-vllm", "MXFP4", "quantization.mxfp4_sm70_moe", "Mxfp4SM70MoEMethod"),
    Target("1cat-vllm", "NVFP4", "quantization.nvfp4_sm70_moe", None),
)

_METHODS = {(target.qualified_module, target.name) for target in TARGETS}


def is_target(method: str) -> bool:
    """Whether a quantization method class, by its full name, is a known MoE loader."""
    module, _, name = method.rpartition(".")
    return (module, name) in _METHODS or ((module, None) in _METHODS and "MoE" in name)
