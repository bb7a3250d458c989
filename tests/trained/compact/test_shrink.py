"""The smaller network computes what the masked one does, and nothing that could go is still there."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.catalogue.models import LeNet5, ResNet20
from fedprior.core.ensemble import Ensemble
from fedprior.trained.compact import compact
from fedprior.trained.compact.source import in_layers, to_source
from fedprior.units import UnitGating, find_structure


class Views(nn.Module):
    """Sizes written out as numbers, a reshape that changes nothing, and a PReLU with a slope a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.prelu = nn.PReLU(6)
        self.fc1 = nn.Linear(6 * 9, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.prelu(self.conv(x)), 2)
        x = torch.relu(self.fc1(x.view(-1, 54)))
        return self.fc2(torch.reshape(x, (x.size(0), 8)))


class Residual(nn.Module):
    """Three layers that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.stem(x))
        b = a + self.left(a)
        return self.head(F.silu(b + torch.relu(self.right(b))))


class Broadcast(nn.Module):
    """One channel is added to many."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.one, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 1, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.many(x) + self.one(x)).flatten(1))


def norms() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3, bias=False), nn.InstanceNorm2d(8, affine=True), nn.GELU()),
        *(nn.Conv2d(8, 5, 3), nn.LayerNorm([5, 2, 2]), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(20, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3)),
    )


def tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 3))


NETWORKS = {
    "lenet5": (lambda: LeNet5(1, 16, 4), (1, 16, 16)),
    "norms": (norms, (2, 12, 12)),
    "tokens": (tokens, (4, 5)),
    "views": (Views, (1, 8, 8)),
    "conv1d": (
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv1d(6, 5, 3), nn.InstanceNorm1d(5), nn.SiLU()),
            *(nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(10, 3)),
        ),
        (2, 16),
    ),
    "residual": (Residual, (4,)),
    "resnet20": (lambda: ResNet20(3, 5), (3, 16, 16)),
    "broadcast": (Broadcast, (1, 4, 4)),
}
ADDS = ("residual", "resnet20", "broadcast")


def masked(name: str, seed: int, probability: float) -> tuple[nn.Module, UnitGating, dict[str, Tensor], Tensor]:
    """A network with random weights, of which none is zero, without the units that random gates close."""
    build, shape = NETWORKS[name]
    torch.manual_seed(seed)
    module, x = build(), torch.randn(5, *shape)
    gating = UnitGating(find_structure(module, x[0]))
    params = {name: 0.3 * torch.randn(p.shape) + 0.01 for name, p in module.named_parameters()}
    gates = {layer: (torch.rand(size) < probability).float() for layer, size in gating.gate_shapes.items()}
    for gate in gates.values():
        gate[torch.randint(len(gate), ())] = 1.0
    module.load_state_dict(gating.prune(params, gates), strict=False)
    return module.eval(), gating, gates, x


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_do_not_change_when_closed_units_are_removed(name: str, seed: int) -> None:
    module, gating, gates, x = masked(name, seed, 0.3 if seed else 0.6)
    small = compact(module, x[0])
    assert small.note == "" or (name in ADDS and "closed units stay as zeros" in small.note)
    torch.testing.assert_close(small.module(x), module(x), atol=1e-5, rtol=1e-5)
    effective = int(gating.effective_parameters(gates))
    if name == "views":  # the slopes of a PReLU are no part of a unit, but go with its channel
        effective -= int((1 - gates["conv"]).sum())
    assert effective <= size(small.module) <= size(module)
    if name not in ADDS:
        assert size(small.module) == effective
        assert small.units == {k: (int(g.sum()), len(g)) for k, g in gates.items() if g.sum() < len(g)}


@pytest.mark.parametrize("seed", range(3))
def test_closed_inputs_of_linear_layers_are_removed(seed: int) -> None:
    torch.manual_seed(seed)
    module, x = LeNet5(1, 20, 4), torch.randn(5, 1, 20, 20)
    gating = UnitGating(find_structure(module, x[0], gate_output=True, linear_gates="inputs"))
    gates = {layer: (torch.rand(size) < 0.4).float() for layer, size in gating.gate_shapes.items()}
    module.load_state_dict(gating.prune(dict(module.named_parameters()), gates), strict=False)
    small = compact(module.eval(), x[0])
    torch.testing.assert_close(small.module(x), module(x), atol=1e-5, rtol=1e-5)
    assert size(small.module) == int(gating.effective_parameters(gates))
    assert "fc1's inputs" in small.units
    text, weights = to_source(*in_layers(small.module), x[0], "")
    assert "torch.index_select" in text
    assert "fc1_inputs" in weights


def test_a_linear_layer_that_reads_nothing_still_has_its_bias() -> None:
    module, x = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(5, 9)
    with torch.no_grad():
        module[0].weight.zero_()
    small = compact(module.eval(), x[0])
    torch.testing.assert_close(small.module(x), module(x))
    assert small.units == {"0's inputs": (1, 9)}


def test_a_summed_channel_is_removed_only_if_every_summand_is_closed() -> None:
    module, _, _, x = masked("residual", 0, 1.0)
    params = dict(module.named_parameters())
    with torch.no_grad():
        for layer, rows in {"stem": [0, 1, 2], "left": [0, 2, 3], "right": [0, 2, 5]}.items():
            params[f"{layer}.weight"][rows] = 0
            params[f"{layer}.bias"][rows] = 0
    small = compact(module, x[0])
    assert small.units == {"stem": (5, 7), "left": (5, 7), "right": (5, 7)}, "0 and 2 are closed in all three"
    assert small.note.startswith("3 closed units stay"), "1 of stem, 3 of left, 5 of right"
    torch.testing.assert_close(small.module(x), module(x))


def test_dense_and_fully_closed_networks() -> None:
    module, x = LeNet5(1, 16, 4), torch.randn(3, 1, 16, 16)
    assert compact(module, x[0]).units == {}
    torch.testing.assert_close(compact(module, x[0]).module(x), module(x))
    with torch.no_grad():
        module.conv2.weight.zero_()
        module.conv2.bias.zero_()
    small = compact(module, x[0])
    assert small.units == {"conv2": (1, 64)}, "a layer without units passes nothing on"
    torch.testing.assert_close(small.module(x), module(x))


def test_the_users_module_is_unchanged() -> None:
    module, _, _, x = masked("lenet5", 0, 0.5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.train()
    compact(module, x[0])
    assert module.training
    assert list(before) == list(module.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["lenet5", "norms", "resnet20"])
def test_aligned_channel_counts_are_multiples_where_convolutions_read_them(name: str) -> None:
    module, _, _, x = masked(name, 1, 0.3)
    small = compact(module, x[0], align=4)
    torch.testing.assert_close(small.module(x), module(x), atol=1e-5, rtol=1e-5)
    convolutions = [m for m in small.module.modules() if isinstance(m, nn.Conv2d)][1:]
    full = [m for m in module.modules() if isinstance(m, nn.Conv2d)][1:]
    assert all(
        m.in_channels % 4 == 0 or m.in_channels == f.in_channels for m, f in zip(convolutions, full, strict=True)
    )
    assert size(compact(module, x[0]).module) < size(small.module) < size(module)


class Hidden(nn.Module):
    """Two linear layers with a function of the hidden units in between."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.function = nn.Linear(4, 6), nn.Linear(6, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.function(self.fc1(x)))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (torch.cos, "'cos'"),  # cos(0) is 1: a closed unit would still have an effect
        (lambda hidden: torch.relu(hidden) / hidden.size(1), "outputs differ"),
    ],
    ids=["cannot be analysed", "depends on its sizes"],
)
def test_a_network_that_cannot_shrink_stays_whole_and_says_why(
    function: Callable[[Tensor], Tensor], words: str
) -> None:
    module, x = Hidden(function), torch.randn(3, 4)
    with torch.no_grad():
        module.fc1.weight[2], module.fc1.bias[2] = 0, 0
    small = compact(module, x[0])
    assert size(small.module) == size(module)
    assert words in small.note
    torch.testing.assert_close(small.module(x), module(x))


def test_every_member_of_an_ensemble_shrinks() -> None:
    (a, *_, x), (b, *_) = masked("lenet5", 0, 0.5), masked("lenet5", 1, 0.5)
    ensemble = Ensemble([a, b]).eval()
    small = compact(ensemble, x[0])
    torch.testing.assert_close(small.module(x), ensemble(x), atol=1e-5, rtol=1e-5)
    assert size(small.module) == size(compact(a, x[0]).module) + size(compact(b, x[0]).module)
