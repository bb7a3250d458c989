"""What every kernel's launch needs.

All programs lie on the first axis of the grid, which takes 2³¹ − 1 of them. The other two take 65,535, fewer than a
large cohort has keys. What varies fastest comes first, so that neighbours work on one client.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def row_grid(rows: int, count: int, block: int) -> tuple[int]:
    """One program per block of a row's `count` places, row by row.

    >>> row_grid(100_000, 1_500, 1_024)
    (200000,)
    """
    return (rows * cdiv(count, block),)


def power(n: int) -> int:
    """The smallest power of two that is at least n, and at least 16: tensor cores take no less."""
    return max(16, 1 << (n - 1).bit_length())


def blocks(images: int, size: int, tile: int) -> dict[str, int]:
    """How a program reads one channel's places, image after image: at most `tile` numbers at once, whole rows first.

    >>> blocks(64, 784, 4096), blocks(5, 1, 4096), blocks(2, 5000, 2048)
    ({'BI': 4, 'BS': 1024, 'num_warps': 8}, {'BI': 8, 'BS': 1, 'num_warps': 4}, {'BI': 1, 'BS': 2048, 'num_warps': 8})
    """
    columns = min(1 << (size - 1).bit_length(), tile)
    rows = min(1 << (images - 1).bit_length(), tile // columns)
    return {"BI": rows, "BS": columns, "num_warps": 8 if rows * columns > 1024 else 4}


def precision() -> str:
    """TF32 products where torch would use them for a convolution, else plain float32."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def strided(x: Tensor) -> Tensor:
    """The tensor, dense except for the clients' dimension, which may be spread or repeated."""
    return x if x[0].is_contiguous() else x.contiguous()


def target(x: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current, because Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def pair(value: Any) -> tuple[int, int]:
    """One size for rows and columns, or one for each."""
    if isinstance(value, int):
        return value, value
    rows, columns = value if len(value) == 2 else (value[0], value[0])
    return int(rows), int(columns)
