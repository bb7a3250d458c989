"""What tracing finds, held to the one truth that matters: a closed unit's readers may be pruned without a trace.

`apply` only zeroes what a closed unit owns; `prune` also zeroes what reads it. Both must compute the same function.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedprior.catalogue.models import LeNet5, LogisticRegression, ResNet20
from fedprior.core.errors import ModelError
from fedprior.core.trees import Gates, Params
from fedprior.units import Reader, Structure, UnitGating, find_structure
from fedprior.units.torch_operations import ZERO_PRESERVING_MODULES


class Net(nn.Module):
    """A network from a forward function and its modules."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def structure_of(model: nn.Module, *shape: int, **options: Any) -> Structure:
    return find_structure(model, torch.randn(shape), **options)


def randomise(model: nn.Module, seed: int = 0) -> Params:
    """Parameters of which none is zero: a fresh norm's zero bias would hide that a channel is not silent."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=draw) * 0.3 + 0.01
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def draw_gates(gating: UnitGating, seed: int, probability: float) -> Gates:
    draw = torch.Generator().manual_seed(seed)
    return {
        layer: (torch.rand(shape, generator=draw) < probability).float() for layer, shape in gating.gate_shapes.items()
    }


def outputs(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.func.functional_call(model.eval(), params, (x,), tie_weights=False)
    return out if isinstance(out, Tensor) else torch.cat([part.flatten() for part in out])


def parameters_in(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------- the networks


def mixed_modules() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3, bias=False), nn.InstanceNorm2d(8, affine=True), nn.GELU(), nn.Dropout2d(0.3)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)),
    )


def functional(self: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(self.conv1(x)), 2, padding=1)
    x = F.dropout(torch.tanh(self.conv2(x) * 0.5 / 2), training=self.training)
    x = F.leaky_relu(self.fc1(x.view(x.size(0), -1)))
    return self.fc2(x)


def residual_linear(self: Any, x: Tensor) -> Tensor:
    a = F.relu(self.stem(x))
    b = a + self.left(a)
    b = b + F.relu(self.right(b))
    return self.head(F.silu(b))


def two_heads(self: Any, x: Tensor) -> Any:
    h = F.relu(self.body(x))
    return self.first(h), self.second(F.elu(h))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet5": (lambda: LeNet5(1, 16, 4), (1, 16, 16)),
    "lenet5-2x2": (lambda: LeNet5(2, 20, 3), (2, 20, 20)),
    "mixed modules": (mixed_modules, (2, 12, 12)),
    "functional": (
        lambda: Net(
            functional,
            conv1=nn.Conv2d(1, 5, 3),
            conv2=nn.Conv2d(5, 6, 3),
            fc1=nn.Linear(24, 9),
            fc2=nn.Linear(9, 3),
        ),
        (1, 8, 8),
    ),
    "global mean": (
        lambda: Net(lambda s, x: s.b(F.relu(s.a(x)).mean((2, 3))), a=nn.Conv2d(1, 6, 3), b=nn.Linear(6, 3)),
        (1, 8, 8),
    ),
    "kept mean": (
        lambda: Net(
            lambda s, x: s.b(torch.mean(F.relu(s.a(x)), dim=[-1, -2], keepdim=True).flatten(1)),
            a=nn.Conv2d(1, 6, 3),
            b=nn.Linear(6, 3),
        ),
        (1, 8, 8),
    ),
    "conv1d": (
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AvgPool1d(2)),
            *(nn.Conv1d(6, 5, 3), nn.InstanceNorm1d(5), nn.SiLU(), nn.AdaptiveMaxPool1d(2), nn.Flatten()),
            nn.Linear(10, 3),
        ),
        (2, 16),
    ),
    "conv1d, layer norm over channels and places": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 6, 3), nn.LayerNorm([6, 6]), nn.ReLU(), nn.Conv1d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 8),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.Mish(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(32, 3)),
        (1, 5, 5, 5),
    ),
    "permuted": (
        lambda: Net(lambda s, x: s.b(s.a(x).permute(0, 2, 1)), a=nn.Conv1d(2, 6, 3), b=nn.Linear(6, 3)),
        (2, 8),
    ),
    "tokens": (
        lambda: Net(
            lambda s, x: s.c(F.gelu(s.b(s.norm(F.relu(s.a(x))))).mean(1)),
            a=nn.Linear(5, 6),
            norm=nn.LayerNorm(6),
            b=nn.Linear(6, 6),
            c=nn.Linear(6, 3),
        ),
        (6, 5),
    ),
    "residual linear": (
        lambda: Net(
            residual_linear,
            stem=nn.Linear(4, 7),
            left=nn.Linear(7, 7, bias=False),
            right=nn.Linear(7, 7),
            head=nn.Linear(7, 3),
        ),
        (4,),
    ),
    "an ungated contribution": (
        lambda: Net(lambda s, x: s.b(F.relu(s.a(x) + x)), a=nn.Linear(6, 6), b=nn.Linear(6, 3)),
        (6,),
    ),
    "one channel added to many": (
        lambda: Net(
            lambda s, x: s.c(F.relu(s.a(x) + s.b(x)).flatten(1)),
            a=nn.Conv2d(1, 4, 3),
            b=nn.Conv2d(1, 1, 3),
            c=nn.Linear(16, 3),
        ),
        (1, 4, 4),
    ),
    "two heads": (
        lambda: Net(two_heads, body=nn.Linear(4, 6), first=nn.Linear(6, 2), second=nn.Linear(6, 3)),
        (4,),
    ),
    "a size times a wire": (
        lambda: Net(
            lambda s, x: s.b(torch.mul(s.a(x), 2) * x.size(1)).contiguous(), a=nn.Linear(4, 6), b=nn.Linear(6, 3)
        ),
        (4,),
    ),
    "registered under two names": (
        lambda: (lambda a: Net(lambda s, x: s.b(F.relu(s.a(x))), a=a, again=nn.Sequential(a), b=nn.Linear(6, 3)))(
            nn.Linear(4, 6)
        ),
        (4,),
    ),
    "a grouped convolution of the input": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
        (4, 6),
    ),
}
BUILT: dict[str, tuple[nn.Module, UnitGating, tuple[int, ...]]] = {}


def built(name: str) -> tuple[nn.Module, UnitGating, tuple[int, ...]]:
    """Trace once: hypothesis comes back many times."""
    if name not in BUILT:
        build, shape = (lambda: ResNet20(classes=5), (3, 8, 8)) if name == "resnet20" else NETWORKS[name]
        model = build()
        BUILT[name] = model, UnitGating(structure_of(model, *shape)), shape
    return BUILT[name]


def check_pruning(name: str, seed: int, probability: float) -> None:
    model, gating, shape = built(name)
    params, gates = randomise(model, seed), draw_gates(gating, seed + 1, probability)
    x = torch.randn((3, *shape), generator=torch.Generator().manual_seed(seed + 2))
    pruned = gating.prune(params, gates)
    assert torch.equal(outputs(model, gating.apply(params, gates), x), outputs(model, pruned, x))
    assert int(gating.effective_parameters(gates)) == sum(int(value.count_nonzero()) for value in pruned.values())


seeds, probabilities = st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, probability=probabilities)
def test_pruning_readers_changes_nothing(name, seed, probability):
    check_pruning(name, seed, probability)


@settings(max_examples=12, deadline=None)
@given(seed=seeds, probability=st.sampled_from([0.1, 0.3, 0.5, 0.8]))
def test_pruning_readers_changes_nothing_across_residual_additions(seed, probability):
    check_pruning("resnet20", seed, probability)


@pytest.mark.parametrize("name", [*NETWORKS, "resnet20"])
def test_every_gate_matters(name):
    """Closing any one unit changes the output: gates are not attached to rows that nothing depends on."""
    model, gating, shape = built(name)
    params = randomise(model, 3)
    x = torch.randn((4, *shape), generator=torch.Generator().manual_seed(0))
    full = outputs(model, params, x)
    for layer, sizes in gating.gate_shapes.items():
        gates = gating.all_open(params)
        gates[layer][sizes[0] // 2] = 0
        assert not torch.equal(outputs(model, gating.apply(params, gates), x), full), layer


@pytest.mark.parametrize("name", [*NETWORKS, "resnet20"])
def test_what_survives_pruning_is_what_the_output_depends_on(name):
    """Seen by autograd: a pruned entry of a reader's weight gets no gradient, and no dead column is left behind.

    A rectifier may be silent on all inputs, so a dependence counts when some draw of the parameters shows it.
    """
    model, gating, shape = built(name)
    gates = draw_gates(gating, 6, 0.6)
    masks = {reader.parameter: gating.mask(gates)[reader.parameter] for reader in gating.structure.readers}
    felt = {key: torch.zeros(gating.shapes[key], dtype=torch.bool) for key in masks}
    for seed in range(8 if masks else 0):
        params = {key: value.requires_grad_() for key, value in randomise(model, seed).items()}
        x = torch.randn((16, *shape), generator=torch.Generator().manual_seed(seed))
        out = torch.func.functional_call(model.eval(), gating.apply(params, gates), (x,), tie_weights=False)
        total = torch.cat([part.flatten() for part in (out if isinstance(out, tuple) else (out,))]).square().sum()
        for key, grad in zip(masks, torch.autograd.grad(total, [params[key] for key in masks]), strict=True):
            felt[key] |= grad != 0
    for key, mask in masks.items():
        assert torch.equal(felt[key], mask.expand(felt[key].shape) > 0), key


# ---------------------------------------------------------------------- counts and structures


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (LeNet5(3, 32, 10), 878_538),
        (LeNet5(1, 28, 62), 608_702),
        (ResNet20(classes=100), 278_324),
        (LogisticRegression(784, 10), 7_850),
    ],
)
def test_the_papers_byte_counts_pin_these_sizes(model, count):
    assert parameters_in(model) == count


def test_lenet5s_structure():
    found = structure_of(LeNet5(3, 32, 10), 3, 32, 32)
    assert [(layer.name, layer.size, layer.kind) for layer in found.layers] == [
        ("conv1", 32, "conv"),
        ("conv2", 64, "conv"),
        ("fc1", 512, "linear"),
    ]
    assert [layer.parameters for layer in found.layers] == [
        (f"{name}.weight", f"{name}.bias") for name in ("conv1", "conv2", "fc1")
    ]
    assert found.readers == (
        Reader("conv2.weight", ("conv1",), 1),
        Reader("fc1.weight", ("conv2",), 25),
        Reader("fc2.weight", ("fc1",), 1),
    )
    assert found.output_layers == ("fc2",)
    assert found.shapes == {name: tuple(p.shape) for name, p in LeNet5(3, 32, 10).named_parameters()}


@settings(max_examples=20, deadline=None)
@given(seed=seeds, probability=probabilities)
def test_lenet5s_effective_size_is_that_of_a_smaller_lenet5(seed, probability):
    _, gating, _ = built("lenet5-2x2")
    gates = draw_gates(gating, seed, probability)
    a, b, c = (int(gates[layer].sum()) for layer in ("conv1", "conv2", "fc1"))
    smaller = a * (2 * 25 + 1) + b * (a * 25 + 1) + c * (b * 4 + 1) + 3 * (c + 1)
    assert int(gating.effective_parameters(gates)) == smaller


def resnet20_size(gates: Gates, channels: int, classes: int) -> int:
    """Counted along ResNet20 as the paper draws it, one block after another."""
    wire = gates["conv"].bool()
    total = int(wire.sum()) * (channels * 9 + 2)
    for i in range(9):
        first, second = gates[f"blocks.{i}.conv1"].bool(), gates[f"blocks.{i}.conv2"].bool()
        total += int(first.sum()) * (int(wire.sum()) * 9 + 2) + int(second.sum()) * (int(first.sum()) * 9 + 2)
        beside = wire
        if i in (3, 6):
            beside = gates[f"blocks.{i}.shortcut.0"].bool()
            total += int(beside.sum()) * (int(wire.sum()) + 2)
        wire = second | beside
    return total + classes * (int(wire.sum()) + 1)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, probability=probabilities)
def test_resnet20s_effective_size_is_counted_block_by_block(seed, probability):
    _, gating, _ = built("resnet20")
    gates = draw_gates(gating, seed, probability)
    assert int(gating.effective_parameters(gates)) == resnet20_size(gates, channels=3, classes=5)


def test_resnet20s_readers_after_an_addition_list_every_contributor():
    found = built("resnet20")[1].structure
    sources = {reader.parameter: set(reader.sources) for reader in found.readers}
    assert sources["blocks.0.conv1.weight"] == {"conv"}
    assert sources["blocks.1.conv1.weight"] == {"conv", "blocks.0.conv2"}
    assert sources["blocks.2.conv1.weight"] == {"conv", "blocks.0.conv2", "blocks.1.conv2"}
    first = {"conv", "blocks.0.conv2", "blocks.1.conv2", "blocks.2.conv2"}
    assert sources["blocks.3.conv1.weight"] == sources["blocks.3.shortcut.0.weight"] == first
    assert sources["blocks.4.conv1.weight"] == {"blocks.3.conv2", "blocks.3.shortcut.0"}
    last = {"blocks.6.conv2", "blocks.6.shortcut.0", "blocks.7.conv2", "blocks.8.conv2"}
    assert sources["fc.weight"] == last
    assert sources["blocks.5.conv2.weight"] == {"blocks.5.conv1"}
    assert len(found.readers) == 9 * 2 + 2 + 1
    assert len(found.layers) == 1 + 9 * 2 + 2
    assert found.output_layers == ("fc",)


def test_a_unit_owns_the_norm_that_follows_it():
    layers = {layer.name: layer.parameters for layer in built("resnet20")[1].structure.layers}
    assert layers["conv"] == ("conv.weight", "norm.weight", "norm.bias")
    assert layers["blocks.3.shortcut.0"] == tuple(
        f"blocks.3.shortcut.{part}" for part in ("0.weight", "1.weight", "1.bias")
    )
    mixed = {layer.name: layer.parameters for layer in built("mixed modules")[1].structure.layers}
    assert mixed == {
        "0": ("0.weight", "0.bias", "1.weight", "1.bias"),
        "4": ("4.weight", "5.weight", "5.bias"),
        "10": ("10.weight", "10.bias", "11.weight", "11.bias"),
    }


def test_nothing_reads_a_wire_with_an_ungated_contribution():
    assert built("an ungated contribution")[1].structure.readers == ()


def test_a_functional_network_is_traced_like_one_of_modules():
    found = built("functional")[1].structure
    assert found.readers == (
        Reader("conv2.weight", ("conv1",), 1),
        Reader("fc1.weight", ("conv2",), 4),
        Reader("fc2.weight", ("fc1",), 1),
    )
    assert found.output_layers == ("fc2",)


def test_several_outputs_leave_several_layers_without_gates():
    found = built("two heads")[1].structure
    assert found.output_layers == ("first", "second")
    assert [layer.name for layer in found.layers] == ["body"]


# Each feeds the output through something that is not a plain wire.
AWKWARD_OUTPUTS = {
    "plus the input": lambda s, x: s.b(F.relu(s.a(x))) + x,
    "in pieces": lambda s, x: s.b(F.relu(s.a(x))).chunk(2, 1),
    "one piece": lambda s, x: s.b(F.relu(s.a(x))).chunk(2, 1)[0],
    "softmax": lambda s, x: torch.softmax(s.b(F.relu(s.a(x))), 1),
    "in a dictionary": lambda s, x: {"out": s.b(F.relu(s.a(x))).sigmoid()},
}


@pytest.mark.parametrize("how", AWKWARD_OUTPUTS)
def test_the_layer_that_feeds_the_output_is_never_gated(how):
    model = Net(AWKWARD_OUTPUTS[how], a=nn.Linear(4, 6), b=nn.Linear(6, 4))
    found = structure_of(model, 4)
    assert [layer.name for layer in found.layers] == ["a"]
    assert found.output_layers == ("b",)
    assert [reader.parameter for reader in found.readers] == ["b.weight"]


def test_gate_output_gates_the_output_layer_too():
    found = structure_of(LeNet5(1, 16, 4), 1, 16, 16, gate_output=True)
    assert [layer.name for layer in found.layers] == ["conv1", "conv2", "fc1", "fc2"]
    only = structure_of(LogisticRegression(6, 4), 6, gate_output=True)
    assert [(layer.name, layer.size) for layer in only.layers] == [("fc", 4)]
    assert only.readers == ()


@pytest.mark.parametrize("ungated", [["conv2"], ("conv2",), iter(["conv2"])])
def test_ungated_layers_have_no_gates_but_still_read(ungated):
    found = structure_of(LeNet5(1, 16, 4), 1, 16, 16, ungated=ungated)
    assert [layer.name for layer in found.layers] == ["conv1", "fc1"]
    assert found.readers == (Reader("conv2.weight", ("conv1",), 1), Reader("fc2.weight", ("fc1",), 1))


def test_ungated_makes_an_unsupported_operation_harmless():
    model = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    found = structure_of(model, 4, ungated=["0"])
    assert [layer.name for layer in found.layers] == ["2"]
    assert [reader.parameter for reader in found.readers] == ["4.weight"]


def test_recurrent_layers_and_what_they_read_have_no_gates():
    """Where there are no other units, gates are on what is read from them; the text says so."""
    model = Net(
        lambda s, x: s.c(F.relu(s.b(s.rnn(s.a(x))[0]))),
        a=nn.Linear(4, 6),
        rnn=nn.GRU(6, 5, batch_first=True),
        b=nn.Linear(5, 8),
        c=nn.Linear(8, 2),
    )
    found = structure_of(model, 3, 4)
    assert [(layer.name, layer.axis) for layer in found.layers] == [("b", 0)]
    assert found.dense == "recurrent layers have no gates, so these are trained and sent in full: rnn (GRU)"
    found = structure_of(model, 3, 4, ungated=["b"])
    assert [(layer.name, layer.size, layer.axis) for layer in found.layers] == [("a", 4, 1), ("c", 8, 1)]
    assert found.dense.endswith("rnn (GRU), so gates are on what other layers read")
    assert structure_of(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), 4).dense == ""


def test_tracing_does_not_change_the_model():
    model = mixed_modules().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    find_structure(model, torch.ones(2, 12, 12))
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------------- frozen and shared parameters


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    model.append(nn.Linear(6, 2))
    for part in (model[0], model[4]):
        part.requires_grad_(False)
    return model


def test_a_frozen_layer_has_no_gates_and_is_not_counted():
    """A client neither trains nor sends it."""
    model = frozen_first()
    found = structure_of(model, 4)
    assert [layer.name for layer in found.layers] == ["2"]
    assert found.readers == ()
    assert set(found.shapes) == {"2.weight", "2.bias", "6.weight", "6.bias"}
    gating = UnitGating(found)
    params = randomise(model)
    gates = {"2": torch.tensor([1.0, 0, 0, 1, 0, 1])}
    assert int(gating.effective_parameters(gates)) == 3 * 6 + 14
    assert set(gating.norms(params)) == {"2"}


def tied() -> nn.Module:
    model = Net(lambda s, x: s.c(F.relu(s.b(F.relu(s.a(x))))), a=nn.Linear(5, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 2))
    model.b.weight = model.a.weight
    return model


def read_by_forward() -> nn.Module:
    return Net(
        lambda s, x: s.c(F.relu(s.b(F.relu(s.a(x))))) + F.linear(x, s.b.weight),
        a=nn.Linear(5, 5),
        b=nn.Linear(5, 5),
        c=nn.Linear(5, 5),
    )


def weight_normed() -> nn.Module:
    return Net(
        lambda s, x: s.b(F.relu(s.a(x))),
        a=nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
        b=nn.Linear(6, 2),
    )


@pytest.mark.parametrize(("build", "culprits"), [(tied, "ab"), (read_by_forward, "b"), (weight_normed, "a")])
def test_a_weight_that_its_module_does_not_own_is_refused(build, culprits):
    with pytest.raises(ModelError, match=rf"module '{culprits[0]}'.*ungated={culprits[0]}"):
        structure_of(build(), 5)


def test_following_the_advice_of_the_error_works():
    model = read_by_forward()
    found = structure_of(model, 5, ungated=["b"])
    assert [layer.name for layer in found.layers] == ["a"]
    assert found.readers == ()  # b.weight has another reader, to whom every column matters
    found = structure_of(tied(), 5, ungated=["a", "b"], gate_output=True)
    assert [layer.name for layer in found.layers] == ["c"]


# ---------------------------------------------------------------------- refusals

ADVICE = "ungated="
REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], list[str]]] = {
    "sigmoid": (
        nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 2)),
        (4,),
        ["module '1' (Sigmoid)", "ungated=0", "structured=false"],
    ),
    "functional sigmoid": (
        Net(lambda s, x: s.b(torch.sigmoid(s.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        ["'sigmoid'", "ungated=a"],
    ),
    "grouped convolution": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 2)),
        (1, 8, 8),
        ["module '1' (Conv2d)", "grouped", "ungated=0"],
    ),
    "grouped convolution last": (
        nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 6, 3, groups=2)),
        (2, 9),
        ["module '2' (Conv1d)", "grouped", "ungated=0"],
    ),
    "module used twice": (
        Net(lambda s, x: s.c(F.relu(s.a(F.relu(s.a(x))))), a=nn.Linear(6, 6), c=nn.Linear(6, 2)),
        (6,),
        ["module 'a'", "twice", "use a separate module"],
    ),
    "control flow": (
        Net(lambda s, x: s.c(F.relu(s.a(x))) if x.sum() > 0 else s.c(s.a(x)), a=nn.Linear(6, 6), c=nn.Linear(6, 2)),
        (6,),
        ["cannot be traced", "control flow", "structured=false"],
    ),
    "wrong input": (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), (5,), ["does not run", "(5,)"]),
    "norm after an addition": (
        Net(
            lambda s, x: s.c(s.norm(s.a(x) + s.b(x))),
            **{name: nn.Linear(6, 6) for name in "ab"},
            norm=nn.LayerNorm(6),
            c=nn.Linear(6, 3),
        ),
        (6,),
        ["module 'norm' (LayerNorm)", "several layers", "ungated=a,b"],
    ),
    "norm after flattening": (
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)),
        (1, 6),
        ["module '2' (LayerNorm)", "ungated=0"],
    ),
    "group norm without affine": (
        nn.Sequential(nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4, affine=False), nn.Flatten(), nn.Linear(16, 2)),
        (1, 6),
        ["module '1' (GroupNorm)", "affine", "ungated=0"],
    ),
    "layer norm without affine": (
        nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 2)),
        (4,),
        ["module '1' (LayerNorm)", "affine", "ungated=0"],
    ),
    "instance norm with running statistics": (
        nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(16, 2)
        ),
        (1, 6),
        ["module '1' (InstanceNorm1d)", "ungated=0"],
    ),
    "layer norm over places, as many as channels": (
        nn.Sequential(nn.Conv1d(2, 6, 3), nn.LayerNorm(6), nn.Flatten(), nn.Linear(36, 3)),
        (2, 8),
        ["module '1' (LayerNorm)", "ungated=0"],
    ),
    "layer norm over tokens too": (
        nn.Sequential(nn.Linear(5, 6), nn.LayerNorm([6, 6]), nn.Linear(6, 3)),
        (6, 5),
        ["module '1' (LayerNorm)", "ungated=0"],
    ),
    "group norm over tokens, as many as features": (
        nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)),
        (6, 5),
        ["module '1' (GroupNorm)", "ungated=0"],
    ),
    "channels in another order": (
        Net(
            lambda s, x: s.b(s.a(x).unflatten(1, (2, 3)).transpose(1, 2).flatten(1)),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 3),
        ),
        (4,),
        ["'unflatten'", "ungated=a"],
    ),
    "linear layer over places": (
        nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Linear(6, 3)),
        (2, 8),
        ["module '2' (Linear)", "does not read the channel dimension", "ungated=0"],
    ),
    "concatenation": (
        Net(lambda s, x: s.c(torch.cat([s.a(x), s.b(x)], 1)), a=nn.Linear(4, 3), b=nn.Linear(4, 3), c=nn.Linear(6, 2)),
        (4,),
        ["'cat'", "ungated=a,b"],
    ),
    "plus one": (
        Net(lambda s, x: s.b(s.a(x) + 1), a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        ["'add'", "ungated=a"],
    ),
    "one over a wire": (
        Net(lambda s, x: s.b(1 / s.a(x)), a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        ["'truediv'", "ungated=a"],
    ),
    "product of two wires": (
        Net(lambda s, x: s.c(s.a(x) * s.b(x)), **{name: nn.Linear(6, 6) for name in "ab"}, c=nn.Linear(6, 3)),
        (6,),
        ["'mul'", "ungated=a,b"],
    ),
    "addition of a vector to an image": (
        Net(
            lambda s, x: s.c((s.a(x) + s.b(x.flatten(1))).flatten(1)),
            a=nn.Conv2d(1, 6, 3),
            b=nn.Linear(64, 6),
            c=nn.Linear(216, 2),
        ),
        (1, 8, 8),
        ["addition", "ungated=a,b"],
    ),
    "mean over channels and rows": (
        Net(lambda s, x: s.b(s.a(x).mean((1, 2))), a=nn.Conv2d(1, 6, 3), b=nn.Linear(6, 3)),
        (1, 8, 8),
        ["mean", "ungated=a"],
    ),
    "pooling over features": (
        nn.Sequential(nn.Linear(5, 6), nn.MaxPool1d(3, 1, 1), nn.Linear(6, 3)),
        (4, 5),
        ["module '1' (MaxPool1d)", "ungated=0"],
    ),
    "functional pooling over features": (
        Net(lambda s, x: s.b(F.avg_pool1d(s.a(x), 3, 1, 1)), a=nn.Linear(5, 6), b=nn.Linear(6, 3)),
        (4, 5),
        ["'avg_pool1d'", "ungated=a"],
    ),
    "a hard tanh that lifts zero": (
        nn.Sequential(nn.Linear(4, 5), nn.Hardtanh(0.5, 1), nn.Linear(5, 2)),
        (4,),
        ["module '1' (Hardtanh)", "ungated=0"],
    ),
    "a functional hard tanh that lifts zero": (
        Net(lambda s, x: s.b(F.hardtanh(s.a(x), 0.5, 1)), a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        ["'hardtanh'", "ungated=a"],
    ),
    "pooling with indices": (
        Net(
            lambda s, x: s.b(s.pool(s.a(x))[0].flatten(1)),
            a=nn.Conv2d(1, 6, 3),
            pool=nn.MaxPool2d(2, return_indices=True),
            b=nn.Linear(54, 3),
        ),
        (1, 8, 8),
        ["module 'pool' (MaxPool2d)", "ungated=a"],
    ),
    "chunks of a wire": (
        Net(lambda s, x: s.b(s.a(x).chunk(2, 1)[0]), a=nn.Linear(4, 6), b=nn.Linear(3, 2)),
        (4,),
        ["'chunk'", "ungated=a"],
    ),
    "a module of two inputs": (
        Net(lambda s, x: s.c(s.two(x, s.a(x))), a=nn.Linear(4, 6), two=nn.Bilinear(4, 6, 5), c=nn.Linear(5, 2)),
        (4,),
        ["module 'two'", "ungated=a"],
    ),
    "only an output layer": (
        LogisticRegression(6, 4),
        (6,),
        ["no hidden units", "structured=false", "gate_output=true"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_analysed_is_refused_with_its_name_and_a_remedy(name):
    model, shape, fragments = REFUSED[name]
    with pytest.raises(ModelError) as refusal:
        structure_of(model, *shape)
    for fragment in fragments:
        assert fragment in str(refusal.value)


@pytest.mark.parametrize("name", [name for name, (*_, texts) in REFUSED.items() if any(ADVICE in t for t in texts)])
def test_the_suggested_remedy_works(name):
    """Ungated as advised, the same model is analysed, or has nothing left to gate."""
    model, shape, fragments = REFUSED[name]
    advised = next(fragment for fragment in fragments if ADVICE in fragment).removeprefix(ADVICE).split(",")
    try:
        found = structure_of(model, *shape, ungated=advised)
    except ModelError as error:
        assert "no hidden units" in str(error)  # noqa: PT017  # either outcome is right, one of them must be
    else:
        assert not {layer.name for layer in found.layers} & set(advised)


def test_frozen_norms_are_refused_because_closed_units_would_still_have_an_effect():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 2))
    model[1].requires_grad_(False)
    with pytest.raises(ModelError, match=r"module '1' \(LayerNorm\).*frozen.*ungated=0"):
        structure_of(model, 4)


def test_an_unknown_name_in_ungated_lists_the_known_ones():
    with pytest.raises(ModelError, match=r"'conv3'.*'conv1', 'conv2', 'fc1', 'fc2'"):
        structure_of(LeNet5(1, 16, 4), 1, 16, 16, ungated=["conv3"])
    with pytest.raises(ModelError, match="'relu'"):
        structure_of(LeNet5(1, 16, 4), 1, 16, 16, ungated=["relu"])


@pytest.mark.parametrize("kind", ZERO_PRESERVING_MODULES, ids=lambda kind: kind.__name__)
def test_operations_listed_as_preserving_zeros_do_so_channel_by_channel(kind):
    name = kind.__name__
    dims = int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 2
    arguments = (2,) if "Pool" in name else ()
    module = kind(*arguments).train()
    x = torch.randn(2, 4, *[4] * dims) * 3
    x[:, 1::2] = 0
    out = module(x)
    assert out.shape[:2] == (2, 4)
    assert not out[:, 1::2].any()
    assert out[:, ::2].any() or "Dropout" in name
