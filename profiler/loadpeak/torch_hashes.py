"""Hash tensors where they are, exactly: any change of one bit of a tensor changes its hash.

A tensor's bytes are read as 32-bit words, in chunks. Each word is multiplied by an odd weight of its place
and the products are added modulo 2**64, which is the same in any order. A word that differs by ``d`` changes
the sum by ``d`` times an odd number, and that is never zero; several changes at once could cancel each other
only by chance, and two lanes of weights leave next to none. The sums, the data type and the shape go through
SHA-256 on the host. Strides do not matter: what counts is the content in row-major order.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import Any

CHUNK_BYTES = 8 << 20
"""Hashing needs seven times as much: weights of both lanes, products, a copy; a little more at its start."""
LANES = 2
_WORD_BYTES = 4
_HELD = re.compile(r"weight|scale|bias|zero|precision|^W_|^moe_quant_config$")
"""Attributes of a module that may hold prepared tensors, without being its parameters or buffers."""
_DEPTH = 3
"""So many objects deep prepared tensors are looked for: ``weight.storage.data``."""


class NotHashable(ValueError):
    """A tensor has no content that could be read; the text says why."""


class Hasher:
    """Hashes tensors; keeps its weights and buffers, by device, until it is dropped."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Read so many bytes at a time, a multiple of 4."""
        self._chunk_bytes = chunk_bytes
        self._buffers: dict[Any, _Buffers] = {}
        self._known: dict[Any, str] = {}

    def hash(self, tensor: Any) -> str:
        """The hash of a plain tensor, in hexadecimal; views of the same memory are read once.

        Raises:
            NotHashable: its content cannot be read.
            RuntimeError: PyTorch cannot (an out-of-memory error is one).
        """
        import torch

        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            plain = _as_integers(tensor.detach())
            place = (plain.device, plain.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place not in self._known:
                self._known[place] = self._digest(f"{tensor.dtype} {tuple(tensor.shape)}", plain)
            return self._known[place]

    def _digest(self, title: str, plain: Any) -> str:
        import torch

        digest = hashlib.sha256(title.encode())
        sums = [
            total for piece in self._pieces(plain) for total in self._buffers_on(plain.device).sums(piece)
        ]
        if sums:
            values = torch.stack(sums).tolist()
            digest.update(struct.pack(f"<{len(values)}q", *values))
        return digest.hexdigest()

    def _pieces(self, plain: Any) -> Iterator[Any]:
        """The content in row-major order, cut by shape alone: equal contents are cut alike."""
        size = plain.numel() * plain.element_size()
        if size == 0:
            return
        if size <= self._chunk_bytes:
            yield plain
            return
        rows = max(1, self._chunk_bytes // (size // plain.shape[0]))
        for part in plain.split(rows):
            yield from self._pieces(part if part.shape[0] > 1 else part[0])

    def _buffers_on(self, device: Any) -> _Buffers:
        if device not in self._buffers:
            self._buffers[device] = _Buffers(self._chunk_bytes, device)
        return self._buffers[device]


class _Buffers:
    """The weights on one device, and all the memory that hashing a piece takes there."""

    def __init__(self, chunk_bytes: int, device: Any) -> None:
        import torch

        count = chunk_bytes // _WORD_BYTES
        self._weights = [_weights(count, lane, device) for lane in range(LANES)]
        self._products = torch.empty(count, dtype=torch.int64, device=device)
        self._copy = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)

    def sums(self, piece: Any) -> Iterator[Any]:
        """The weighted sum of a piece in each lane."""
        words = self._words(piece)
        products = self._products[: words.numel()]
        for weights in self._weights:
            yield products.copy_(words).mul_(weights[: words.numel()]).sum()

    def _words(self, piece: Any) -> Any:
        """A piece as flat 32-bit words; copied, with zeros at the end, where it does not lie so."""
        import torch

        size = piece.numel() * piece.element_size()
        if size % _WORD_BYTES == 0 and piece.data_ptr() % _WORD_BYTES == 0 and piece.is_contiguous():
            return piece.view(-1).view(torch.int32)
        whole = self._copy[: -(-size // _WORD_BYTES) * _WORD_BYTES]
        whole[size:].zero_()
        whole[:size].view(piece.dtype).view(piece.shape).copy_(piece)
        return whole.view(torch.int32)


def _as_integers(tensor: Any) -> Any:
    """The same memory as integers of the same size, for which PyTorch has all it needs.

    Raises:
        NotHashable: there is no memory to look at.
    """
    import torch

    if tensor.device.type == "meta":
        raise NotHashable("it is on the meta device")
    if tensor.layout != torch.strided:
        raise NotHashable(f"its layout is {tensor.layout}")
    if tensor.is_quantized:
        raise NotHashable(f"its type {tensor.dtype} is PyTorch's own quantized one")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def _weights(count: int, lane: int, device: Any) -> Any:
    """Odd 64-bit weights by place, scrambled as SplitMix64 does; the same on every device and version."""
    import torch

    state = torch.arange(1 + lane * count, 1 + (lane + 1) * count, dtype=torch.int64, device=device)
    state.mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state.bitwise_xor_(state.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1))
        state.mul_(_signed(factor))
    return state.bitwise_or_(1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def named_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor that a model holds, by its full name: parameters, buffers, and what replaced them.

    Some quantization methods keep prepared weights as plain attributes of the module or of themselves, within
    objects of a kernel library. Wrappers around several tensors are taken apart.
    """
    import torch

    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield from _within(dot + name, tensor, 0)
        held = [(dot, module), (dot + "quant_method.", getattr(module, "quant_method", None))]
        for place, owner in held:
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if _HELD.search(name) and not isinstance(value, torch.nn.Module):
                    yield from _within(place + name, value, _DEPTH)


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The tensors in a value, so many objects deep."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for inner in value.__tensor_flatten__()[0]:
                yield from _within(f"{name}.{inner}", getattr(value, inner), depth)
        else:
            yield name, value
    elif depth:
        if isinstance(value, (list, tuple)):
            items: list[tuple[Any, Any]] = list(enumerate(value))
        else:
            items = list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).items())
        for key, inner in items:
            yield from _within(f"{name}.{key}", inner, depth - 1)
