"""A norm without channels that are zero gives what the whole norm gives on those that are left."""

import pytest
import torch
from torch import nn

from fedprior.trained.compact.layers import smaller_norm
from fedprior.trained.compact.shrink import TOLERANCE, largest_difference

KEEP = torch.tensor([True, False, True, True, False, False, False, True])


def filled(norm: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    for p in norm.parameters():
        p.data = torch.randn(p.shape, generator=draw).double()
    for name, buffer in norm.named_buffers():
        if buffer.is_floating_point():
            buffer.data = (torch.rand(buffer.shape, generator=draw) + (0.5 if "var" in name else -0.5)).double()
    return norm.double().eval()


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["", "near eps"])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.GroupNorm(2, 8), (5, 8, 3, 3)),
        (nn.GroupNorm(1, 8), (5, 8, 3)),
        (nn.GroupNorm(4, 8, eps=0.1), (5, 8, 2)),
        (nn.LayerNorm(8), (5, 4, 8)),
        (nn.LayerNorm(8, bias=False), (5, 8)),
        (nn.InstanceNorm2d(8, affine=True), (5, 8, 3, 3)),
        (nn.BatchNorm2d(8), (5, 8, 3, 3)),
    ],
    ids=str,
)
def test_the_pruned_norm_equals_the_full_norm_on_the_rest(
    norm: nn.Module, shape: tuple[int, ...], scale: float
) -> None:
    filled(norm)
    axis = len(shape) - 1 if isinstance(norm, nn.LayerNorm) else 1
    x = scale * (1 + torch.randn(shape, generator=torch.Generator().manual_seed(1)).double())
    x.index_fill_(axis, (~KEEP).nonzero().flatten(), 0.0)  # a closed unit says nothing
    left = KEEP.nonzero().flatten()
    whole = norm(x).index_select(axis, left)
    small = smaller_norm(norm, KEEP, axis).eval()
    torch.testing.assert_close(small(x.index_select(axis, left)), whole, rtol=1e-9, atol=1e-9)


def test_the_largest_difference_is_relative_to_large_outputs_and_absolute_to_small_ones() -> None:
    one, other = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    for mine, yours, found in ((200.0, 202.0, 0.01), (0.5, 0.75, 0.25), (2.0, 1.0, 0.5)):
        one.weight.data.fill_(mine)
        other.weight.data.fill_(yours)
        assert largest_difference(one, other, torch.ones(1, 1).double()) == pytest.approx(found)
    assert TOLERANCE <= 1e-4, "float32 rounds to seven digits; a wrong channel is off by far more"
