"""The 2×2 max pool without indices: torch writes 64 bits per output, and reads them back."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior.kernels.function import Elementwise
from fedprior.kernels.launch import cdiv, target

BLOCK = 512


def max_pool2d(x: Tensor) -> Tensor:
    """`torch.nn.functional.max_pool2d(x, 2)` over the last two of any number of dimensions."""
    out: Tensor = MaxPool.apply(x)
    return out


def _launch(x: Tensor, windows: int) -> tuple[dict[str, Any], tuple[int]]:
    high, wide = x.shape[-2:]
    sizes = {"H": high, "W": wide, "WIDE": x.numel() >= 2**31, "BLOCK": BLOCK, "num_warps": 4}
    return sizes, (cdiv(windows, BLOCK),)


def forward(x: Tensor) -> Tensor:
    """The largest of every 2×2 window."""
    from fedprior.kernels.pool_kernels import pool_kernel

    x = x.contiguous()
    out = x.new_empty(*x.shape[:-2], x.shape[-2] // 2, x.shape[-1] // 2)
    sizes, grid = _launch(x, out.numel())
    with target(x):
        pool_kernel[grid](x, out, out.numel(), **sizes)
    return out


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """Each output's gradient, where its largest input is."""
    from fedprior.kernels.pool_kernels import pool_backward_kernel

    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    windows = x.shape[:-2].numel() * cdiv(x.shape[-2], 2) * cdiv(x.shape[-1], 2)
    sizes, grid = _launch(x, windows)
    with target(x):
        pool_backward_kernel[grid](grad, x, out, windows, **sizes)
    return out


class MaxPool(Elementwise):
    """Maps inputs to outputs."""

    forward = staticmethod(forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return MaxPoolGradient.apply(grad, *ctx.saved_tensors)


class MaxPoolGradient(Elementwise):
    """Maps the outputs' gradient and inputs to the inputs' gradient; its own derivative is torch's."""

    forward = staticmethod(backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        planes = x.flatten(0, -3)
        _, places = F.max_pool2d(planes, 2, return_indices=True)
        picked = cotangent.flatten(0, -3).flatten(1).gather(1, places.flatten(1))
        return picked.reshape(*x.shape[:-2], *places.shape[-2:]), None
