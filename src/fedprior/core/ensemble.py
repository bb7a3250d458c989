"""Several models that predict as one."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """The logarithm of the members' mean probability: softmax gives that mean, argmax its vote.

    Where outputs are no logits of classes (`class_dim` None), the members' mean output.
    """

    def __init__(self, members: Iterable[nn.Module], class_dim: int | None = -1) -> None:
        super().__init__()
        self.members, self.class_dim = nn.ModuleList(members), class_dim

    def forward(self, x: Tensor) -> Tensor:
        if self.class_dim is None:
            return torch.stack([member(x) for member in self.members]).mean(0)
        return torch.stack([member(x).softmax(self.class_dim) for member in self.members]).mean(0).log()
