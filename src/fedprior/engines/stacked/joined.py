"""Many tensors as one long one: for most of them, a GPU takes longer to launch than to read."""

import torch
from torch import Tensor

from fedprior.core import trees


class Kept:
    """A copy of tensors with one row per run, from which runs that are not fine can be restored.

    Meanwhile all tensors of a kind form one long one: for most of them, a GPU takes as long to launch as to copy.
    """

    def __init__(self, tensors: list[Tensor], rows: int) -> None:
        self.tensors, self.rows = tensors, rows
        self.old = self._join(tensors)

    def _join(self, tensors: list[Tensor]) -> dict[torch.dtype, Tensor]:
        kinds = {tensor.dtype for tensor in self.tensors}
        pairs = list(zip(self.tensors, tensors, strict=True))
        return {
            kind: torch.cat([new.reshape(self.rows, -1) for mine, new in pairs if mine.dtype == kind], 1)
            for kind in kinds
        }

    def put(self, fine: Tensor, new: list[Tensor]) -> None:
        """Row by row, put the new values if the flag is set, else the old."""
        for kind, values in self._join(new).items():
            targets = [tensor for tensor in self.tensors if tensor.dtype == kind]
            chosen = torch.where(fine[:, None], values, self.old[kind])
            pieces = chosen.split([target.numel() // self.rows for target in targets], 1)
            shaped = [piece.reshape(-1).view(target.shape) for piece, target in zip(pieces, targets, strict=True)]
            trees.copy_all(targets, shaped)
