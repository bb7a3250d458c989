"""What every kernel's launch needs."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def power(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16: tensor cores take no less."""
    return max(16, 1 << (n - 1).bit_length())


def precision() -> str:
    """TF32 products where torch would use them for a convolution, else plain float32."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def strided(x: Tensor) -> Tensor:
    """Dense but for the clients' dimension, which may be spread or repeated."""
    return x if x[0].is_contiguous() else x.contiguous()


def target(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def fold(size: int, dim: int | None, x: Tensor) -> Tensor:
    """`vmap`'s dimension folded into the clients' in front: (size · clients, ...)."""
    front = x.movedim(dim, 0) if dim is not None else x.unsqueeze(0).expand(size, *x.shape)
    return front.reshape(size * x.shape[0 if dim is None or dim > 0 else 1], *front.shape[2:])


def unfold(size: int, x: Tensor) -> Tensor:
    """The inverse: `vmap`'s dimension in front."""
    return x.unflatten(0, (size, -1))
