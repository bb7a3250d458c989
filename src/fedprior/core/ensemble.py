"""Several models that act as one."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Source(NamedTuple):
    """The run that an ensemble was drawn from."""

    title: str
    records: str
    """A checksum of its records up to there: no two runs have the same."""


class Ensemble(nn.Module):
    """Outputs the logarithm of the members' mean probability: softmax recovers the mean, argmax its vote.

    If outputs are not class logits (`class_dim` is None), it outputs the members' mean.
    """

    def __init__(self, members: Iterable[nn.Module], class_dim: int | None = -1, source: Source | None = None) -> None:
        super().__init__()
        self.members, self.class_dim, self.source = nn.ModuleList(members), class_dim, source

    def __call__(self, *x: Tensor, **named: Tensor) -> Tensor:
        """The same for several inputs, which are passed by name: fx, which writes exports, cannot trace those."""
        if named:
            return self._joined([member(*x, **named) for member in self.members])
        output: Tensor = super().__call__(*x)
        return output

    def forward(self, x: Tensor) -> Tensor:
        return self._joined([member(x) for member in self.members])

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        if self.class_dim is None:
            return torch.stack(outputs).mean(0)
        return torch.stack([output.softmax(self.class_dim) for output in outputs]).mean(0).log()
