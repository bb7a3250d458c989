"""Keyed draws as a function that `torch.func` can batch: a cohort's keys end in one launch."""

from typing import Any

import torch
from torch import Tensor

from fedprior.kernels.launch import cdiv, target

BLOCK = 1024


def uniform(key: Tensor, count: int) -> Tensor:
    """`count` float32 numbers for each key, the same as `fedprior.keys.uniform` gives."""
    drawn: Tensor = Uniform.apply(key, count)
    return drawn


class Uniform(torch.autograd.Function):
    """Keys of any shape to draws of that shape and one dimension more."""

    @staticmethod
    def forward(key: Tensor, count: int) -> Tensor:
        from fedprior.kernels.draw_kernels import uniform_kernel

        key = key.contiguous()
        out = torch.empty(*key.shape, count, device=key.device)
        if out.numel():
            with target(key):
                uniform_kernel[(cdiv(count, BLOCK), key.numel())](key, out, count, BLOCK=BLOCK)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: Tensor, count: int) -> Any:
        if in_dims[0] is None:
            return Uniform.apply(key, count), None
        return Uniform.apply(key.movedim(in_dims[0], 0), count), 0
