"""Kernels as functions that `torch.func` can batch: whatever `vmap` nests ends in one launch."""

from typing import Any

import torch
from torch import Tensor


class Batched(torch.autograd.Function):
    """A function of tensors that carry the clients in front: `vmap`'s dimension folds into the clients'."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        given = [cls.lifted(size, dim, x) if isinstance(x, Tensor) else x for dim, x in zip(in_dims, args, strict=True)]
        out = cls.apply(*given)
        if isinstance(out, Tensor):
            return cls.lowered(size, out), 0
        return tuple(cls.lowered(size, part) for part in out), (0,) * len(out)

    @staticmethod
    def lifted(size: int, dim: int | None, x: Tensor) -> Tensor:
        """(size · clients, ...); what is not batched is repeated."""
        return in_front(size, dim, x).flatten(0, 1)

    @staticmethod
    def lowered(size: int, x: Tensor) -> Tensor:
        """The inverse: `vmap`'s dimension in front."""
        return x.reshape(size, x.shape[0] // size, *x.shape[1:])


class Elementwise(Batched):
    """A function of tensors with any number of dimensions in front: `vmap`'s is one more."""

    @staticmethod
    def lifted(size: int, dim: int | None, x: Tensor) -> Tensor:
        return in_front(size, dim, x)

    @staticmethod
    def lowered(size: int, x: Tensor) -> Tensor:
        return x


def in_front(size: int, dim: int | None, x: Tensor) -> Tensor:
    """`vmap`'s dimension in front; what is not batched is repeated, without a copy."""
    return x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
