"""Several models that predict as one."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """The logarithm of the members' mean probability: softmax gives that mean, argmax its vote."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x).softmax(-1) for member in self.members]).mean(0).log()
