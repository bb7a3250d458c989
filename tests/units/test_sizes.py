"""What a gate switches, and what must not be taken for a plain sum of channels."""

import pytest
import torch
from torch import Tensor, nn

from fedprior.core.errors import ModelError
from fedprior.units import UnitGating, WeightGating, find_structure


def test_joint_sizes_are_in_the_order_of_the_gates() -> None:
    """A filter of 3×3 on one channel has 10 parameters, a neuron that reads 2·36 inputs has 73."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3), nn.ReLU(), nn.Linear(3, 2))
    gating = UnitGating(find_structure(model, torch.zeros(1, 8, 8)))
    assert gating.joint_sizes(torch.zeros(1)).tolist() == [10, 10, 73, 73, 73]
    assert gating.joint_sizes(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    assert WeightGating({"w": (2, 2), "b": (2,)}).joint_sizes(torch.zeros(1)).tolist() == [1, 1, 1, 1]


class Crossed(nn.Module):
    """Adds the channels of one layer to the units of another, which are in another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(1, 4, 1), nn.Linear(4, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        channels = torch.relu(self.a(x))  # [N, 4, 4], channels in dimension 1
        units = torch.relu(self.b(x.expand(-1, 4, -1)))  # [N, 4, 4], units in dimension 2
        result: Tensor = self.c((channels + units).flatten(1))
        return result


def test_channels_of_different_dimensions_cannot_be_added() -> None:
    with pytest.raises(ModelError, match="differently laid out"):
        find_structure(Crossed(), torch.zeros(1, 4))
