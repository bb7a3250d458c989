"""Batched batch norm: each client has its own statistics, weight and bias; one launch forwards, one backwards.

Tensors carry the clients in front: inputs (clients, images, channels, ...), which images are real (clients, images),
weights and biases (clients, channels).
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from fedprior.core.operations import batched
from fedprior.kernels.function import Batched
from fedprior.kernels.launch import blocks, strided, target

TILE = 2048
"""How many numbers a program reads at once."""


def batch_norm(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output and each channel's mean and variance, for what `vmap` batches; both weight and bias, or neither."""
    rest = [None if p is None else p.unsqueeze(0) for p in (mask, weight, bias)]
    out, mean, variance = BatchNorm.apply(x.unsqueeze(0), *rest, eps)
    return out.squeeze(0), mean.squeeze(0), variance.squeeze(0)


def fits(x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> bool:
    """Whether the kernels can take these tensors."""
    return batched(x) and (weight is None) == (bias is None) and 0 < x.numel() < 2**31


def normalise(
    x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`fedprior.core.batch_norm.normalise`, for what `vmap` batches."""
    return batch_norm(x, None if real is None else real.to(x.dtype), weight, bias, eps)


def _launch(x: Tensor) -> tuple[dict[str, Any], tuple[int]]:
    clients, images, channels, size = *x.shape[:3], prod(x.shape[3:])
    return {"C": channels, "SIZE": size, **blocks(images, size, TILE)}, (clients * channels,)


def forward(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and each channel's mean and variance."""
    from fedprior.kernels.batch_kernels import batch_kernel

    x = strided(x)
    m, w, b = (x if p is None else strided(p) for p in (mask, weight, bias))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    means, variances = (x.new_empty(x.shape[0], x.shape[2]) for _ in range(2))
    sizes, grid = _launch(x)
    strides = x.stride(0), m.stride(0), w.stride(0), b.stride(0)
    with target(x):
        batch_kernel[grid](
            x, m, w, b, out, means, variances, *strides, x.shape[1], eps,
            AFFINE=weight is not None, MASKED=mask is not None, **sizes,
        )  # fmt: skip
    return out, means, variances


def backward(
    grad: Tensor, x: Tensor, mask: Tensor | None, weight: Tensor | None, means: Tensor, variances: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for the input, the weight and the bias (the latter two empty without weights)."""
    from fedprior.kernels.batch_kernels import batch_backward_kernel

    grad, x = strided(grad), strided(x)
    m, w = (x if p is None else strided(p) for p in (mask, weight))
    means, variances = means.contiguous(), variances.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    clients, images, channels = x.shape[:3]
    sums = x.new_empty(2, clients, 0 if weight is None else channels)
    sizes, grid = _launch(x)
    strides = grad.stride(0), x.stride(0), m.stride(0), w.stride(0)
    with target(x):
        batch_backward_kernel[grid](
            grad, x, m, w, means, variances, out, sums if sums.numel() else out, *strides, images, clients, eps,
            AFFINE=weight is not None, MASKED=mask is not None, **sizes,
        )  # fmt: skip
    dw, db = sums.unbind(0)
    return out, dw, db


class BatchNorm(Batched):
    """The output and the statistics; no gradient flows through the statistics."""

    forward = staticmethod(forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, mask, weight, _, ctx.eps = inputs
        _, means, variances = output
        ctx.mark_non_differentiable(means, variances)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mask, weight, means, variances)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, mask, weight, means, variances = ctx.saved_tensors
        dx, dw, db = BatchNormGradient.apply(grad, x, mask, weight, means, variances, ctx.eps)
        return (dx, None, dw, db, None) if weight is not None else (dx, None, None, None, None)


class BatchNormGradient(Batched):
    """The gradients. A second derivative, which is rare, falls back to torch's own operations."""

    forward = staticmethod(backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, x, mask, weight, _, _, ctx.eps = inputs
        ctx.save_for_backward(grad, x, mask, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        grad, x, mask, weight = ctx.saved_tensors
        if weight is None:
            pull = torch.func.vjp(lambda g, x: _plain(g, x, mask, None, ctx.eps)[0], grad, x)[1]
            return (*pull(cotangents[0]), None, None, None, None, None)
        pull = torch.func.vjp(lambda g, x, w: _plain(g, x, mask, w, ctx.eps), grad, x, weight)[1]
        dg, dx, dw = pull(cotangents)
        return dg, dx, None, dw, None, None, None


def _plain(
    grad: Tensor, x: Tensor, mask: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from plain operations."""
    flat, g = x.flatten(3), grad.flatten(3)
    if flat.dim() == 3:
        flat, g = flat.unsqueeze(3), g.unsqueeze(3)
    real = torch.ones_like(flat[:, :, 0, 0]) if mask is None else mask
    share = (real / (real.sum(1, keepdim=True) * flat.shape[3]).clamp(min=1))[:, :, None, None]
    mean = (flat * share).sum((1, 3), keepdim=True)
    scale = (((flat - mean).square() * share).sum((1, 3), keepdim=True) + eps).rsqrt()
    normal = (flat - mean) * scale
    dw, db = (g * normal).sum((1, 3)), g.sum((1, 3))
    dx = (g - share * (db[:, None, :, None] + normal * dw[:, None, :, None])) * scale
    dx = dx if weight is None else dx * weight[:, None, :, None]
    return dx.reshape(x.shape), dw, db
