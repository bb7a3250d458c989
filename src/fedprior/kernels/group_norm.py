"""Batched group norm: one weight and bias per client, one launch forwards and one backwards.

Tensors carry the clients in front: inputs (clients, images, channels, ...), weights and biases (clients, channels).
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from fedprior.kernels.function import Batched
from fedprior.kernels.launch import strided, target

LARGEST = 16384
"""How many elements of one group fit into one program's registers."""


def fits(x: Tensor, groups: int) -> bool:
    """Whether the kernel can hold one group of (images, channels, ...) at a time."""
    if x.dim() < 3 or x.shape[1] % groups:
        return False
    channels, size = _blocks(x.shape[1] // groups, prod(x.shape[2:]))
    return channels * size <= LARGEST


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.nn.functional.group_norm` for inputs and weights that `vmap` batches; both weight and bias, or neither."""
    affine = [None if p is None else p.unsqueeze(0) for p in (weight, bias)]
    out: Tensor = GroupNorm.apply(x.unsqueeze(0), *affine, groups, eps)[0]
    return out.squeeze(0)


def _blocks(channels: int, size: int) -> tuple[int, int]:
    return 1 << (channels - 1).bit_length(), 1 << (size - 1).bit_length()


def _launch(x: Tensor, groups: int) -> tuple[dict[str, Any], tuple[int]]:
    channels, size = x.shape[2], prod(x.shape[3:])
    rows, columns = _blocks(channels // groups, size)
    warps = min(16, max(1, rows * columns // 1024))
    sizes = {"C": channels, "SIZE": size, "GROUPS": groups, "BC": rows, "BS": columns, "num_warps": warps}
    return sizes, (x.shape[0] * x.shape[1] * groups,)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and each group's mean and inverse deviation."""
    from fedprior.kernels.norm_kernels import norm_kernel

    x = strided(x)
    w, b = (x if p is None else strided(p) for p in (weight, bias))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    means, scales = (x.new_empty(*x.shape[:2], groups) for _ in range(2))
    sizes, grid = _launch(x, groups)
    strides = x.stride(0), w.stride(0), b.stride(0)
    with target(x):
        norm_kernel[grid](x, w, b, out, means, scales, *strides, x.shape[1], eps, AFFINE=weight is not None, **sizes)
    return out, means, scales


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for the input, the weight and the bias (the latter two empty without weights)."""
    from fedprior.kernels.norm_kernels import norm_backward_kernel

    grad, x = strided(grad), strided(x)
    w = x if weight is None else strided(weight)
    means, scales = means.contiguous(), scales.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    clients, images, channels = x.shape[:3]
    sums = x.new_empty(2, clients, images, 0 if weight is None else channels)
    sizes, grid = _launch(x, groups)
    strides = grad.stride(0), x.stride(0), w.stride(0)
    with target(x):
        norm_backward_kernel[grid](
            grad, x, w, means, scales, out, sums if sums.numel() else out, *strides, images,
            AFFINE=weight is not None, **sizes,
        )  # fmt: skip
    dw, db = sums.sum(2).unbind(0)
    return out, dw, db


class GroupNorm(Batched):
    """The output, and the statistics that the gradient needs."""

    forward = staticmethod(forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.groups, ctx.eps = inputs
        _, means, scales = output
        ctx.mark_non_differentiable(means, scales)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, means, scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, means, scales = ctx.saved_tensors
        dx, dw, db = GroupNormGradient.apply(grad, x, weight, means, scales, ctx.groups, ctx.eps)
        return (dx, dw, db, None, None) if weight is not None else (dx, None, None, None, None)


class GroupNormGradient(Batched):
    """The gradients. A second derivative, which is rare, falls back to torch's own operations."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(grad, x, weight, means, scales, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, x, weight, _, _, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(grad, x, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        grad, x, weight = ctx.saved_tensors
        if weight is None:
            pull = torch.func.vjp(lambda g, x: _plain(g, x, None, ctx.groups, ctx.eps)[0], grad, x)[1]
            return (*pull(cotangents[0]), None, None, None, None, None)
        pull = torch.func.vjp(lambda g, x, w: _plain(g, x, w, ctx.groups, ctx.eps), grad, x, weight)[1]
        return (*pull(cotangents), None, None, None, None)


def _plain(grad: Tensor, x: Tensor, weight: Tensor | None, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from plain operations."""
    grouped = x.flatten(3).unflatten(2, (groups, -1))
    variance, mean = torch.var_mean(grouped, (3, 4), correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normal = (grouped - mean) * scale
    g = grad.flatten(3).unflatten(2, (groups, -1))
    dw, db = ((g * normal).sum((1, 4)).flatten(1), g.sum((1, 4)).flatten(1))
    if weight is not None:
        g = g * weight.unflatten(1, (groups, -1))[:, None, :, :, None]
    dx = (g - g.mean((3, 4), keepdim=True) - normal * (g * normal).mean((3, 4), keepdim=True)) * scale
    return dx.reshape(x.shape), dw, db
