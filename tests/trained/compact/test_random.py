"""Random networks with random units closed: the smaller one computes the same to the last digits, and its size is that
of the formula. In float64, so that a wrong epsilon or a count that is off by one is no rounding."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedprior.trained.compact import compact
from fedprior.trained.compact.layers import smaller_norm
from fedprior.trained.compact.norm import PrunedNorm

SIDE = 6


class Add(nn.Module):
    """A residual block."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@dataclass
class Built:
    """A network, and what must be left of it."""

    layers: list[nn.Module] = field(default_factory=list)
    units: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    """Layers and norms, with the channels that are open in them."""
    left: int = 0
    """The formula's number of parameters."""


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor, int]:
    """Convolutions with norms, activations, pools and residual blocks, then two linear layers."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    built, side = Built(), SIDE
    channels = keep = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 2))):
        outputs, blocks = draw(st.integers(2, 7)), draw(st.integers(0, 2))
        chosen = [opened(draw, outputs) for _ in range(blocks + 1)]
        together = int(torch.stack(chosen).any(0).sum())  # channels that are added go where all are closed
        for i, open_ in enumerate(chosen):
            inner = convolution(draw, built, channels, outputs, side, open_, keep, together)
            built.layers += [inner if i == 0 else Add(inner), activation(draw, built, outputs, together)]
            channels, keep = outputs, together
        if draw(st.booleans()):
            built.layers.append(draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2)])))
            side //= 2
    hidden = draw(st.integers(2, 6))
    open_ = opened(draw, hidden)
    first, last = nn.Linear(channels * side * side, hidden), nn.Linear(hidden, 3)
    built.units.append((first, open_))
    built.layers += [nn.Flatten(), first, nn.ReLU(), last]
    built.left += int(open_.sum()) * (keep * side * side + 1) + 3 * (int(open_.sum()) + 1)
    module = nn.Sequential(*built.layers).double().eval()
    close(module, built.units)
    return module, torch.randn(4, *(module_input(built), SIDE, SIDE), dtype=torch.float64), built.left


def module_input(built: Built) -> int:
    return next(m for layer in built.layers for m in layer.modules() if isinstance(m, nn.Conv2d)).in_channels


def opened(draw: st.DrawFn, size: int) -> Tensor:
    """Which units stay; at least one."""
    open_ = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    open_[draw(st.integers(0, size - 1))] = True
    return open_


def convolution(
    draw: st.DrawFn, built: Built, inputs: int, outputs: int, side: int, open_: Tensor, keep: int, together: int
) -> nn.Module:
    """With a norm or without; `keep` of its inputs and `together` of its outputs stay."""
    kernel, bias = draw(st.sampled_from([1, 3])), draw(st.booleans())
    mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
    layer = nn.Conv2d(inputs, outputs, kernel, padding="same", padding_mode=mode, bias=bias)
    groups = draw(st.sampled_from([g for g in range(1, outputs + 1) if outputs % g == 0]))
    norm = draw(
        st.sampled_from(
            [
                None,
                nn.GroupNorm(groups, outputs, eps=0.1),
                nn.LayerNorm([outputs, side, side]),
                nn.InstanceNorm2d(outputs, affine=True),
                nn.BatchNorm2d(outputs),
            ]
        )
    )
    built.units += [(part, open_) for part in (layer, norm) if part is not None]
    folded = isinstance(norm, nn.BatchNorm2d)  # what is left of it is the layer's bias
    built.left += together * (keep * kernel**2 + (bias or folded))
    if norm is None:
        return layer
    built.left += 0 if folded else 2 * together * (side**2 if isinstance(norm, nn.LayerNorm) else 1)
    return nn.Sequential(layer, norm)


def activation(draw: st.DrawFn, built: Built, channels: int, left: int) -> nn.Module:
    chosen = draw(st.sampled_from([nn.ReLU(), nn.GELU(), nn.Tanh(), nn.PReLU(channels), nn.LeakyReLU(0.2)]))
    built.left += left if isinstance(chosen, nn.PReLU) else 0
    return chosen


@torch.no_grad()
def close(module: nn.Module, units: list[tuple[nn.Module, Tensor]]) -> None:
    """Random weights, none of them zero, but for the rows of closed units; what reads those stays."""
    for p in module.parameters():
        p.copy_((0.2 + torch.rand_like(p)) * torch.where(torch.rand_like(p) < 0.5, -1, 1) / p[0].numel() ** 0.5)
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    for part, open_ in units:
        for p in part.parameters():
            p[~open_] = 0


@settings(max_examples=25)
@given(networks(), st.sampled_from([1, 1, 2, 4]))
def test_outputs_are_the_same_and_the_size_is_as_computed(network: tuple[nn.Module, Tensor, int], align: int) -> None:
    module, x, left = network
    small = compact(module, x[0], align=align)
    assert "no unit was removed" not in small.note
    with torch.no_grad():
        torch.testing.assert_close(small.module(x), module(x), atol=1e-11, rtol=1e-11)
    found = sum(p.numel() for p in small.module.parameters())
    assert found == left if align == 1 else left <= found <= sum(p.numel() for p in module.parameters())


def test_a_depthwise_convolution_keeps_the_network_whole() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(3, 2, 6, 6)
    with torch.no_grad():
        module[0].weight[2], module[0].bias[2] = 0, 0
    small = compact(module.eval(), x[0])
    assert small.note.startswith("no unit was removed: module '2' (Conv2d), a grouped convolution")
    torch.testing.assert_close(small.module(x), module(x))


@settings(max_examples=25)
@given(st.data(), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_a_pruned_norm_is_the_norm_of_all_channels(data: st.DataObject, seed: int, spatial: bool, bias: bool) -> None:
    """Against torch's own, with the channels of zeros still there."""
    torch.manual_seed(seed)
    groups, each = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=groups * each, max_size=groups * each)))
    keep[0] = True
    full = nn.GroupNorm(groups, groups * each, eps=0.3).double()
    x = torch.randn(2, groups * each, *([3] if spatial else []), dtype=torch.float64)
    x[:, ~keep] = 0
    nn.init.normal_(full.weight)
    nn.init.normal_(full.bias)
    if not bias:
        full.register_parameter("bias", None)
    small = smaller_norm(full, keep, 1)
    assert isinstance(small, PrunedNorm) == (not keep.all())
    with torch.no_grad():
        torch.testing.assert_close(small(x[:, keep]), full(x)[:, keep], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("align", [1, 8])
def test_every_layer_reports_its_number_of_units(align: int) -> None:
    """Attributes are no part of the outputs, but model.py is written from them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 9, 3), nn.PReLU(9), nn.Conv2d(9, 4, 3), nn.InstanceNorm2d(4), nn.Flatten())
    module = nn.Sequential(*module, nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    with torch.no_grad():
        for layer, rows in ((module[0], [1, 4]), (module[2], [0]), (module[5], [3])):
            layer.weight[rows], layer.bias[rows] = 0, 0
    small = compact(module, torch.randn(2, 6, 6), align=align).module
    first, prelu, second, norm, linear, last = (small.get_submodule(name) for name in "012357")
    kept = 7 if align == 1 else 8
    assert (first.in_channels, first.out_channels, prelu.num_parameters) == (2, kept, kept)
    assert (second.in_channels, second.out_channels, norm.num_features) == (kept, 3, 3)
    assert (linear.in_features, linear.out_features, last.in_features, last.out_features) == (12, 4, 4, 3)
