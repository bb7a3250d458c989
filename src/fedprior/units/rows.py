"""Groups of weights as rows of matrices: their norms, and gates times groups, the gates of all layers in one vector."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedprior.core.operations import operation

MOST = 3
"""Tensors of such a layer: a weight, and a bias or a norm's weight and bias."""


class Rows(NamedTuple):
    """A layer of `units` groups: a row of a matrix each, and an entry of each of some vectors."""

    units: int
    tensors: int
    """The matrix, and the vectors."""


@operation
def row_norms(weights: Sequence[Tensor]) -> Tensor:
    """‖w_g‖₂ of every row of these matrices, in one vector; without a gradient."""
    flat = (weight.detach().reshape(weight.shape[0], -1) for weight in weights)
    return torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in flat])


@operation
def scale_rows(layers: tuple[Rows, ...], gates: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each gate of one vector times its own group; the tensors are listed layer by layer."""
    parts = gates.split([layer.units for layer in layers])
    each = [part for part, layer in zip(parts, layers, strict=True) for _ in range(layer.tensors)]
    return [t * part.reshape(-1, *[1] * (t.dim() - 1)) for t, part in zip(tensors, each, strict=True)]
