"""Random contents for vLLM's dummy weights: the same in every process, different in every tensor.

Scales are positive.

vLLM fills floating-point weights from one seed and leaves packed integers as they lie in memory. Two startups
can only be compared by their weights if all of them are set.
"""

from __future__ import annotations

import itertools
from typing import Any


def install(flip: bool = False) -> None:
    """Fill every weight of the next models that this process loads with ``load_format="dummy"``.

    Args:
        flip: change one bit of the last weight, for a comparison that has to find it.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    seeds = itertools.count(1)

    def fill(tensor: Any, *_: Any, **__: Any) -> None:
        tensor = tensor.detach()
        if tensor.device.type == "meta":
            return
        generator = torch.Generator(device=tensor.device).manual_seed(next(seeds))
        if not tensor.is_floating_point():
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
        elif tensor.element_size() == 1:
            # 8-bit floats of both signs from 0.25 to 2: no infinities, no temporary copy.
            bits = tensor.view(torch.uint8).random_(0, 256, generator=generator)
            bits.bitwise_and_(0x97).bitwise_or_(0x28)
        else:
            tensor.uniform_(-1e-3, 1e-3, generator=generator)

    original = dummy_loader.DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, model, *args, **kwargs)
        for name, tensor in model.named_parameters():
            scale = tensor.detach() if "scale" in name else None
            if scale is not None and scale.dtype == torch.uint8:
                # Exponents of MXFP4 groups, around 2**-8.
                generator = torch.Generator(device=scale.device).manual_seed(next(seeds))
                scale.random_(117, 122, generator=generator)
            elif scale is not None and scale.element_size() == 1:
                scale.view(torch.uint8).bitwise_and_(0x7F)
            elif scale is not None:
                scale.abs_()
        if flip:
            tensor.detach().view(torch.uint8).view(-1)[-1] ^= 1
        return result

    weight_utils.initialize_single_dummy_weight = fill
    dummy_loader.initialize_single_dummy_weight = fill
    dummy_loader.DummyModelLoader.load_weights = load_weights
