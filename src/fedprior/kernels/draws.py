"""Keyed draws as functions that `torch.func` can batch: all of a cohort's keys share one launch."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from fedprior.kernels.function import Elementwise
from fedprior.kernels.launch import cdiv, row_grid, target

BLOCK = 1024


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """`keys.uniform` in float32, the only `dtype` supported; for each key, if the tensor has several."""
    drawn: Tensor = Uniform.apply(key, prod(shape))
    return drawn.reshape(*key.shape, *shape)


def bits(key: Tensor, count: int) -> Tensor:
    """`keys.bits`; for each key, if the tensor has several."""
    drawn: Tensor = Bits.apply(key, count)
    return drawn


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """`keys.mix_in`."""
    if isinstance(data, int):
        number: Tensor = FoldNumber.apply(key, data)
        return number
    dims = max(key.dim(), data.dim())  # equal, so that a dimension that `vmap` puts in front is the same for both
    key, data = (x.reshape([1] * (dims - x.dim()) + list(x.shape)) for x in (key, data))
    folded: Tensor = Fold.apply(key, data)
    return folded


def dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """`keys.dropout`; differentiable in x."""
    out: Tensor = Dropout.apply(x, key, rate)
    return out


def _fold(key: Tensor, data: Tensor | None, number: int) -> Tensor:
    from fedprior.kernels.draw_kernels import fold_kernel

    shape = key.shape if data is None else torch.broadcast_shapes(key.shape, data.shape)
    out = torch.empty(shape, dtype=torch.int64, device=key.device)
    columns = shape[-1] if shape else 1
    # Two strides each: what is broadcast has a stride of zero, and only from three dimensions on may it be copied.
    plane = [x.expand(shape).reshape(-1, columns) for x in ((key,) if data is None else (key, data))]
    if out.numel():
        with target(key):
            fold_kernel[(cdiv(out.numel(), BLOCK),)](
                plane[0], plane[-1], out, number, out.numel(), columns, *plane[0].stride(), *plane[-1].stride(),
                NUMBER=data is None, BLOCK=BLOCK,
            )  # fmt: skip
    return out


def _drawn(kernel: Any, key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Maps keys of any shape to draws of that shape with one more dimension."""
    key = key.contiguous()
    out = torch.empty(*key.shape, count, dtype=dtype, device=key.device)
    if out.numel():
        with target(key):
            kernel[row_grid(key.numel(), count, BLOCK)](key, out, count, BLOCK=BLOCK)
    return out


class _Keyed(Elementwise):
    """A function of keys, which has no gradient."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


class Uniform(_Keyed):
    """Maps keys, and how many numbers each draws, to these numbers."""

    @staticmethod
    def forward(key: Tensor, count: int) -> Tensor:
        from fedprior.kernels.draw_kernels import uniform_kernel

        return _drawn(uniform_kernel, key, count, torch.float32)


class Bits(_Keyed):
    """The same for whole numbers."""

    @staticmethod
    def forward(key: Tensor, count: int) -> Tensor:
        from fedprior.kernels.draw_kernels import bits_kernel

        return _drawn(bits_kernel, key, count, torch.int64)


class FoldNumber(_Keyed):
    """Maps keys, and one mixed number for all of them, to new keys."""

    @staticmethod
    def forward(key: Tensor, number: int) -> Tensor:
        return _fold(key, None, number)


class Fold(_Keyed):
    """Maps keys and numbers of as many dimensions to new keys."""

    @staticmethod
    def forward(key: Tensor, data: Tensor) -> Tensor:
        return _fold(key, data, 0)


class Dropout(Elementwise):
    """Takes inputs of the keys' shape with more dimensions; linear in them, and its own transpose."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, rate: float) -> Tensor:
        from fedprior.kernels.draw_kernels import dropout_kernel

        x, key = x.contiguous(), key.contiguous()
        out = torch.empty_like(x)
        if out.numel():
            count = x.numel() // key.numel()
            with target(x):
                dropout_kernel[row_grid(key.numel(), count, BLOCK)](
                    x, key, out, count, rate, 1 / (1 - rate), BLOCK=BLOCK
                )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, key, ctx.rate = inputs
        ctx.save_for_backward(key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Dropout.apply(grad, *ctx.saved_tensors, ctx.rate), None, None
