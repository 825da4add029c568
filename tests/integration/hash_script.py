"""``python hash_script.py``: hashes of real tensors; prints one JSON object of findings.

Runs in the vLLM environment of the integration tests, which has torch.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from loadpeak.torch_hashes import Hasher, named_tensors

CHUNK_BYTES = 16
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint4,
    torch.uint16,
)


def fresh(tensor: Any) -> str:
    """The hash of a tensor by a hasher that knows no other."""
    return Hasher(CHUNK_BYTES).hash(tensor)


def of_type(dtype: Any, raw: Any) -> Any:
    """A tensor on these bytes."""
    return torch.view_as_complex(raw.view(torch.float32).view(-1, 2)) if dtype.is_complex else raw.view(dtype)


def unseen_bits(dtype: Any) -> int:
    """Of all bits of a tensor with an odd number of elements, how many could change without being seen."""
    raw = torch.randint(0, 256, (11 * torch.empty(0, dtype=dtype).element_size(),), dtype=torch.uint8)
    tensor, before, unseen = of_type(dtype, raw), fresh(of_type(dtype, raw)), 0
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            unseen += fresh(tensor) == before
            raw[place] ^= 1 << bit
    return unseen + (fresh(tensor) != before)


def strides() -> list[str]:
    """Layouts whose hash is not that of the same content side by side, or that hide a changed bit."""
    base = torch.randn(6, 10, dtype=torch.float32)
    layouts = {
        "transposed": base.t(),
        "sliced": base[::2, 1::3],
        "column": base[:, 3],
        "expanded": base[:1].expand(5, 10),
        "cut off": base[1:, :7],
        "row larger than a chunk": base[:1],
        "odd place": torch.zeros(9, dtype=torch.uint8)[1:8],
        "four dimensions": torch.randn(2, 3, 4, 5).permute(3, 0, 2, 1),
    }
    wrong = []
    for name, tensor in layouts.items():
        before = fresh(tensor)
        if before != fresh(tensor.contiguous().clone()):
            wrong.append(name)
        tensor.view(torch.uint8 if tensor.dtype == torch.uint8 else torch.int32)[(-1,) * tensor.dim()] ^= 1
        if fresh(tensor) == before:
            wrong.append(f"{name}, changed")
    return wrong


def told_apart() -> dict[str, bool]:
    """Pairs that differ in something else than one bit."""
    numbers = torch.arange(1.0, 13.0)
    swapped = numbers[torch.tensor([1, 0, *range(2, 12)])]
    two_signs = torch.ones(4, 4, dtype=torch.bfloat16)
    flipped = two_signs.clone()
    flipped[0, 3], flipped[1, 3] = -1, -1
    pairs = {
        "places": (numbers, swapped),
        "signs of two elements": (two_signs, flipped),
        "shape": (numbers.view(3, 4), numbers.view(4, 3)),
        "type": (numbers, numbers.view(torch.int32)),
        "trailing zeros": (torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
        "empty shapes": (torch.zeros(0, 3), torch.zeros(3, 0)),
        "no dimension": (torch.tensor(1.0), torch.tensor([1.0])),
        "chunks in another order": (numbers.view(3, 4), numbers.view(3, 4).flip(0)),
    }
    return {name: fresh(one) != fresh(other) for name, (one, other) in pairs.items()}


class Pair(torch.Tensor):  # type: ignore[misc]
    """A tensor that wraps two others, as quantized ones do."""

    @staticmethod
    def __new__(cls, data: Any, scale: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_part, made.scale_part = data, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_part", "scale_part"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, shape: Any, stride: Any) -> Any:
        return Pair(inner["data_part"], inner["scale_part"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default, function
        return Pair(args[0].data_part, args[0].scale_part)


class Strict(torch.nn.Parameter):  # type: ignore[misc]
    """A parameter that minds what is done with it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(function)


def model_names() -> list[str]:
    """What is found in a model, by name."""
    model = torch.nn.Module()
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.register_buffer("steps", torch.zeros(1))
    layer.scale = torch.ones(1)
    layer.kv_cache = torch.ones(1)
    layer.w13_weight = SimpleNamespace(storage=SimpleNamespace(data=torch.ones(1)), shape=(1,))
    layer.quant_method = SimpleNamespace(w2_precision_config=SimpleNamespace(weight_scale=torch.ones(1)))
    layer.packed_weight = torch.nn.Parameter(Pair(torch.ones(2), torch.ones(1)), requires_grad=False)
    model.layers = torch.nn.ModuleList([layer])
    model.head = torch.nn.Linear(2, 2, bias=False)
    model.head.weight = layer.weight
    return sorted(name for name, _ in named_tensors(model))


def reasons() -> dict[str, str]:
    """Why some tensors have no hash."""
    found = {}
    for name, tensor in {
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "uninitialized": torch.nn.UninitializedParameter(),
    }.items():
        try:
            found[name] = fresh(tensor)
        except Exception as error:  # noqa: BLE001 - any of them is caught where tensors are hashed
            found[name] = f"{type(error).__name__}: {error}"
    return found


def highest_resident_bytes() -> int:
    """The most memory that this process had at a time."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def growth_bytes() -> int:
    """What hashing a large tensor needs, one whose rows do not lie side by side."""
    tensor = torch.ones(1 << 14, 1 << 14, dtype=torch.uint8).t()
    Hasher().hash(torch.ones(1))
    before = highest_resident_bytes()
    Hasher().hash(tensor)
    return highest_resident_bytes() - before


if __name__ == "__main__":
    growth = growth_bytes()
    torch.manual_seed(0)
    held = torch.ones(8)
    print(
        json.dumps(
            {
                "growth_bytes": growth,
                "unseen_bits": {str(dtype): unseen_bits(dtype) for dtype in DTYPES},
                "strides": strides(),
                "told_apart": told_apart(),
                "names": model_names(),
                "reasons": reasons(),
                "parameter": fresh(Strict(held, requires_grad=False)) == fresh(held),
                "aliases": (shared := Hasher()).hash(held.view(2, 4)) == shared.hash(held.view(2, 4)),
                "grad mode": torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
                "golden": Hasher().hash(torch.arange(100, dtype=torch.int32)),
            }
        )
    )
