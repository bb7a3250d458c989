"""Kernels for a vectorised cohort on a GPU: one weight set a client, where torch's grouped ones are slow."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from fedprior.kernels.mode import BatchedKernels, available, usable

__all__ = ["BatchedKernels", "available", "routed", "usable"]


def routed(x: Tensor) -> AbstractContextManager[Any]:
    """Within this context a model's calls on tensors like `x` go to the kernels, where there are any for them."""
    return BatchedKernels() if x.is_cuda and available() else nullcontext()
