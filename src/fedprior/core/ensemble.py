"""Several models that act as one."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """Outputs the logarithm of the members' mean probability: softmax recovers the mean, argmax its vote.

    If outputs are not class logits (`class_dim` is None), it outputs the members' mean.
    """

    def __init__(self, members: Iterable[nn.Module], class_dim: int | None = -1) -> None:
        super().__init__()
        self.members, self.class_dim = nn.ModuleList(members), class_dim

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        outputs = [member(*x, **named) for member in self.members]
        if self.class_dim is None:
            return torch.stack(outputs).mean(0)
        return torch.stack([output.softmax(self.class_dim) for output in outputs]).mean(0).log()
