"""Gates against loops: norms, sizes, masks of probabilities, and the floor that no layer may fall below."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedprior.catalogue.models import LeNet5, ResNet20
from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params
from fedprior.units import Gating, UnitGating, WeightGating, find_structure


class Residual(nn.Module):
    """Small enough to list all gates' values; a norm, a flattening and a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(1, 2, 2)
        self.norm = nn.GroupNorm(1, 2)
        self.b = nn.Conv1d(2, 2, 1, bias=False)
        self.c = nn.Linear(4, 3)
        self.d = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.a(x)))
        x = x + self.b(x)
        return self.d(torch.relu(self.c(x.flatten(1))))


@pytest.fixture(scope="module")
def residual() -> UnitGating:
    return UnitGating(find_structure(Residual(), torch.randn(1, 3)))


def random_params(gating: Gating, seed: int = 0) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in gating.shapes.items()}


def naive_norm(params: Params, owned: list[str], unit: int) -> float:
    return math.sqrt(sum(v**2 for name in owned for v in params[name][unit].flatten().tolist()))


# ---------------------------------------------------------------------- norms and sizes


def test_norms_are_those_of_a_loop_over_units(residual):
    params = random_params(residual)
    owned = {
        "a": ["a.weight", "a.bias", "norm.weight", "norm.bias"],
        "b": ["b.weight"],
        "c": ["c.weight", "c.bias"],
    }
    norms = residual.norms(params)
    assert list(norms) == ["a", "b", "c"]
    for layer, names in owned.items():
        expected = [naive_norm(params, names, unit) for unit in range(len(norms[layer]))]
        assert norms[layer].tolist() == pytest.approx(expected, rel=1e-12)


def test_norms_of_lenet5_are_those_of_a_loop_over_units():
    gating = UnitGating(find_structure(LeNet5(1, 16, 4), torch.randn(1, 16, 16)))
    params = random_params(gating)
    for layer, norms in gating.norms(params).items():
        for unit in range(0, len(norms), 7):
            expected = naive_norm(params, [f"{layer}.weight", f"{layer}.bias"], unit)
            assert float(norms[unit]) == pytest.approx(expected, rel=1e-12)


def test_sizes_are_what_a_gate_switches(residual):
    assert residual.sizes() == {"a": 2 + 1 + 2, "b": 2, "c": 4 + 1}
    lenet = UnitGating(find_structure(LeNet5(3, 32, 10), torch.randn(3, 32, 32)))
    assert lenet.sizes() == {"conv1": 76, "conv2": 801, "fc1": 1601}
    assert lenet.gate_shapes == {"conv1": (32,), "conv2": (64,), "fc1": (512,)}


def test_closing_one_gate_zeroes_as_many_parameters_as_its_size(residual):
    params = random_params(residual)
    for layer, size in residual.sizes().items():
        gates = residual.all_open(params)
        gates[layer][1] = 0
        applied = residual.apply(params, gates)
        zeros = {name: value == 0 for name, value in applied.items()}
        assert sum(int(zero.sum()) for zero in zeros.values()) == size
        assert all(torch.equal(applied[name][~zero], params[name][~zero]) for name, zero in zeros.items())


def test_norms_can_be_differentiated_at_a_group_of_zeros(residual):
    params = {name: torch.zeros_like(value).requires_grad_() for name, value in random_params(residual).items()}
    total = sum(norm.sum() for norm in residual.norms(params).values())
    grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    assert all(grad is None or bool(grad.isfinite().all()) for grad in grads)


# ---------------------------------------------------------------------- masks


def listed(gating: Gating) -> list[tuple[str, int]]:
    return [(layer, i) for layer, shape in gating.gate_shapes.items() for i in range(torch.Size(shape).numel())]


def as_gates(gating: Gating, values: tuple[float, ...]) -> Gates:
    numbers = iter(values)
    return {
        layer: torch.tensor([next(numbers) for _ in range(torch.Size(shape).numel())], dtype=torch.float64).reshape(
            shape
        )
        for layer, shape in gating.gate_shapes.items()
    }


def naive_mask(gates: Gates) -> Params:
    """What `Residual` is left with, entry by entry, said by hand."""
    a, b, c = (gates[layer].tolist() for layer in "abc")
    wire = [max(x, y) for x, y in zip(a, b, strict=True)]
    return {
        "a.weight": torch.tensor([[[x] * 2] for x in a]),
        "a.bias": torch.tensor(a),
        "norm.weight": torch.tensor(a),
        "norm.bias": torch.tensor(a),
        "b.weight": torch.tensor([[[y * x] for x in a] for y in b]),
        "c.weight": torch.tensor([[z * wire[j // 2] for j in range(4)] for z in c]),
        "c.bias": torch.tensor(c),
        "d.weight": torch.tensor([c, c]),
        "d.bias": torch.ones(2),
    }


def test_masks_of_hard_gates_equal_those_written_by_hand(residual):
    params = random_params(residual)
    for values in itertools.product([0.0, 1.0], repeat=len(listed(residual))):
        gates = as_gates(residual, values)
        expected = naive_mask(gates)
        pruned = residual.prune(params, gates)
        assert all(torch.equal(pruned[name], value * expected[name]) for name, value in params.items())
        assert int(residual.effective_parameters(gates)) == sum(int(mask.sum()) for mask in expected.values())


@settings(max_examples=10, deadline=None)
@given(probabilities=st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_a_mask_of_probabilities_is_the_expectation_over_all_hard_gates(residual, probabilities):
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in residual.shapes.items()}
    size = 0.0
    for values in itertools.product([0.0, 1.0], repeat=7):
        weight = math.prod(p if z else 1 - p for p, z in zip(probabilities, values, strict=True))
        for name, mask in naive_mask(as_gates(residual, values)).items():
            expected[name] += weight * mask.double()
            size += weight * float(mask.sum())
    soft = as_gates(residual, tuple(probabilities))
    masks = residual.mask(soft)
    for name, value in expected.items():
        found = masks[name].expand(value.shape) if name in masks else torch.ones_like(value)
        assert torch.allclose(found, value, rtol=0, atol=1e-12), name
    assert float(residual.effective_parameters(soft)) == pytest.approx(size)


def test_resnet20s_expected_size_is_the_mean_over_drawn_gates():
    """Sources of a column and its own row are independent, also where three or four layers feed one channel."""
    gating = UnitGating(find_structure(ResNet20(classes=5), torch.randn(3, 8, 8)))
    draw = torch.Generator().manual_seed(0)
    soft = {
        layer: torch.rand(shape, generator=draw, dtype=torch.float64) for layer, shape in gating.gate_shapes.items()
    }
    sizes = [
        float(gating.effective_parameters({layer: torch.bernoulli(p, generator=draw) for layer, p in soft.items()}))
        for _ in range(200)
    ]
    mean, error = torch.tensor(sizes).mean(), torch.tensor(sizes).std() / math.sqrt(200)
    assert abs(float(mean) - float(gating.effective_parameters(soft))) < 5 * float(error)


def test_pruned_entries_are_zero_and_the_rest_untouched(residual):
    params = random_params(residual)
    pruned = residual.prune(params, as_gates(residual, (1, 0, 0, 0, 1, 0, 1)))
    # Channel 1 has no contributor left, so its two columns of c are gone, and so is row 1.
    assert pruned["c.weight"].ne(0).tolist() == [
        [True, True, False, False],
        [False] * 4,
        [True, True, False, False],
    ]
    assert pruned["d.weight"].ne(0).tolist() == [[True, False, True]] * 2
    assert torch.equal(pruned["d.bias"], params["d.bias"])
    assert torch.equal(pruned["a.weight"][0], params["a.weight"][0])


def test_pruning_keeps_the_precision(residual):
    params = {name: value.float() for name, value in random_params(residual).items()}
    gates = {layer: gate.double() for layer, gate in residual.all_open(params).items()}
    assert all(value.dtype == torch.float32 for value in residual.prune(params, gates).values())


def test_all_open_leaves_everything(residual):
    params = random_params(residual)
    gates = residual.all_open(params)
    assert {layer: tuple(gate.shape) for layer, gate in gates.items()} == residual.gate_shapes
    assert all(torch.equal(value, params[name]) for name, value in residual.prune(params, gates).items())
    assert int(residual.effective_parameters(gates)) == sum(value.numel() for value in params.values())


def test_masks_and_norms_are_the_same_under_vmap(residual):
    rows = [random_params(residual, seed) for seed in range(3)]
    draw = torch.Generator().manual_seed(1)
    gates = [
        {layer: torch.rand(shape, generator=draw, dtype=torch.float64) for layer, shape in residual.gate_shapes.items()}
        for _ in rows
    ]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    stacked_gates = {name: torch.stack([row[name] for row in gates]) for name in gates[0]}
    pruned = torch.func.vmap(residual.prune)(stacked, stacked_gates)
    norms = torch.func.vmap(residual.norms)(stacked)
    sizes = torch.func.vmap(residual.effective_parameters)(stacked_gates)
    for i, (row, gate) in enumerate(zip(rows, gates, strict=True)):
        assert all(torch.allclose(pruned[name][i], value) for name, value in residual.prune(row, gate).items())
        assert all(torch.allclose(norms[name][i], value) for name, value in residual.norms(row).items())
        assert float(sizes[i]) == pytest.approx(float(residual.effective_parameters(gate)))


def test_tensors_kept_from_within_a_transform_stay_usable():
    """Sizes and tables first asked for under `grad`, or in inference mode, can be copied and trained with later."""

    def price(gating, gates):
        return (gates * gating.joint_sizes(gates)).sum() + gating.positions.on("heard", gates.device).sum()

    def fresh():
        return UnitGating(find_structure(Residual(), torch.randn(1, 3)))

    def in_inference(function, gates):
        with torch.inference_mode():
            return function(gates)

    expected = [float(fresh().sizes()[layer]) for layer, (count,) in fresh().gate_shapes.items() for _ in range(count)]
    plain, rows = torch.ones(len(expected)), torch.ones(2, len(expected))
    for ask, asked in (
        (lambda f, x: torch.func.grad(f)(x), plain),
        (lambda f, x: torch.func.vmap(torch.func.grad(f))(x), rows),
        (in_inference, plain),
    ):
        gating = fresh()
        ask(lambda gates, gating=gating: price(gating, gates), asked)
        gates = plain.clone().requires_grad_()
        price(copy.deepcopy(gating), gates).backward()
        assert gates.grad.tolist() == expected


# ---------------------------------------------------------------------- the floor


def floored(gates: list[float], scores: list[float], least: int) -> tuple[list[float], float]:
    gating = WeightGating({"w": (1, len(gates))}, floor=least)
    kept, acted = gating.floor({"w": torch.tensor([gates])}, {"w": torch.tensor([scores])})
    assert kept["w"].shape == (1, len(gates))
    return kept["w"][0].tolist(), float(acted["w"])


layers = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n),
        st.permutations(range(n)),
        st.integers(1, 15),
    )
)


@settings(max_examples=100, deadline=None)
@given(layer=layers)
def test_the_floor_holds_and_reports_where_it_acted(layer):
    gates, ranks, least = layer
    scores = [float(rank) for rank in ranks]
    kept, acted = floored(gates, scores, least)
    enough = min(least, len(gates))
    if sum(gates) >= enough:
        assert kept == gates
        assert acted == 0
        return
    assert acted == 1
    assert sum(kept) >= enough
    best = sorted(range(len(gates)), key=lambda i: -scores[i])[:enough]
    assert kept == [1.0 if gate or i in best else 0.0 for i, gate in enumerate(gates)]


def test_an_empty_layer_keeps_its_best_gate():
    assert floored([0, 0, 0, 0], [-9.0, -2.0, -3.0, -8.0], 1) == ([0, 1, 0, 0], 1)


def test_the_floor_opens_exactly_the_missing_gates():
    """The usual case: open gates are the best ones, so exactly the least number is left."""
    assert floored([0, 1, 0, 0], [-9.0, 2.0, -3.0, -8.0], 3) == ([0, 1, 1, 1], 1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), least=st.integers(1, 4), closed=st.floats(0.5, 1))
def test_the_floor_of_all_layers_at_once_equals_that_of_each(seed, least, closed):
    gating = UnitGating(find_structure(Residual(), torch.randn(1, 3)), floor=least)
    draw = torch.Generator().manual_seed(seed)
    scores = {layer: torch.randn(shape, generator=draw) for layer, shape in gating.gate_shapes.items()}
    gates = {layer: (torch.rand(value.shape, generator=draw) > closed).float() for layer, value in scores.items()}
    joint = gating.join(gates), gating.join(scores)
    (kept, acted), (each, acted_on) = gating.joint_floor(*joint), Gating.joint_floor(gating, *joint)
    assert torch.equal(kept, each)
    assert {k: float(v) for k, v in acted.items()} == {k: float(v) for k, v in acted_on.items()}
    assert torch.equal(gating.totals(kept), Gating.totals(gating, kept))


def test_the_floor_acts_layer_by_layer():
    gating = WeightGating({"a": (2, 2), "b": (1, 3)}, floor=2)
    gates = {"a": torch.ones(2, 2), "b": torch.zeros(1, 3)}
    scores = {"a": torch.randn(2, 2), "b": torch.tensor([[0.5, -1.0, 0.1]])}
    kept, acted = gating.floor(gates, scores)
    assert kept["a"].tolist() == [[1, 1], [1, 1]]
    assert kept["b"].tolist() == [[1, 0, 1]]
    assert (float(acted["a"]), float(acted["b"])) == (0, 1)


def test_the_floor_is_the_same_under_vmap():
    gating = WeightGating({"w": (2, 5)}, floor=3)
    draw = torch.Generator().manual_seed(2)
    gates = (torch.rand(20, 2, 5, generator=draw) < torch.linspace(0, 0.6, 20)[:, None, None]).float()
    scores = torch.randn(20, 2, 5, generator=draw)
    kept, acted = torch.func.vmap(gating.floor)({"w": gates}, {"w": scores})
    assert 0 < float(acted["w"].sum()) < 20
    for i in range(20):
        alone, alone_acted = gating.floor({"w": gates[i]}, {"w": scores[i]})
        assert torch.equal(kept["w"][i], alone["w"])
        assert float(acted["w"][i]) == float(alone_acted["w"])


@pytest.mark.parametrize("least", [0, -1])
def test_a_floor_below_one_is_refused(least):
    with pytest.raises(SettingError, match="floor"):
        WeightGating({"w": (2, 2)}, floor=least)
    with pytest.raises(SettingError, match="floor"):
        UnitGating(find_structure(LeNet5(1, 16, 4), torch.randn(1, 16, 16)), floor=least)


# ---------------------------------------------------------------------- one gate per weight

SHAPES = {"conv": (3, 2, 2, 2), "fc": (2, 5), "bias": (5,), "scale": ()}


def test_weights_of_two_dimensions_have_a_gate_each():
    gating = WeightGating(SHAPES)
    assert gating.gate_shapes == {"conv": (3, 2, 2, 2), "fc": (2, 5)}
    assert gating.sizes() == {"conv": 1, "fc": 1}


def test_a_weights_norm_is_its_magnitude():
    gating = WeightGating(SHAPES)
    params = random_params(gating)
    norms = gating.norms(params)
    assert set(norms) == {"conv", "fc"}
    assert norms["fc"].flatten().tolist() == [abs(v) for v in params["fc"].flatten().tolist()]


@settings(max_examples=25, deadline=None)
@given(bits=st.lists(st.sampled_from([0.0, 1.0]), min_size=34, max_size=34))
def test_a_weights_gate_switches_that_weight_and_nothing_else(bits):
    gating = WeightGating(SHAPES)
    params, gates = random_params(gating), as_gates(gating, tuple(bits))
    pruned = gating.prune(params, gates)
    flat = torch.cat([pruned["conv"].flatten(), pruned["fc"].flatten()]).tolist()
    original = torch.cat([params["conv"].flatten(), params["fc"].flatten()]).tolist()
    assert flat == [value if bit else 0 for value, bit in zip(original, bits, strict=True)]
    assert torch.equal(pruned["bias"], params["bias"])
    assert torch.equal(pruned["scale"], params["scale"])
    applied = gating.apply(params, gates)
    assert all(torch.equal(applied[name], pruned[name]) for name in params)
    assert int(gating.effective_parameters(gates)) == int(sum(bits)) + 5 + 1


def test_a_weights_mask_of_probabilities_is_itself():
    gating = WeightGating(SHAPES)
    draw = torch.Generator().manual_seed(0)
    soft = {layer: torch.rand(shape, generator=draw) for layer, shape in gating.gate_shapes.items()}
    masks = gating.mask(soft)
    assert all(torch.equal(masks[layer], soft[layer]) for layer in soft)
    expected = sum(float(gate.double().sum()) for gate in soft.values()) + 6
    assert float(gating.effective_parameters(soft)) == pytest.approx(expected)


# ---------------------------------------------------------------------- gates on inputs


class Perceptron(nn.Module):
    """Three linear layers, the first reading the input; smooth, so that every parameter that counts shows."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)
        self.norm = nn.LayerNorm(3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))))
        return out


def by_inputs(model: nn.Module, example: Tensor, **options: Any) -> UnitGating:
    return UnitGating(find_structure(model.double(), example.double(), linear_gates="inputs", **options))


INPUT_GATED = {
    "hidden": ({"norm": False}, {}, {"a": (3,), "b": (3,)}),
    "output": ({"norm": False}, {"gate_output": True}, {"a": (3,), "b": (3,), "c": (2,)}),
    "ungated": ({"norm": False}, {"gate_output": True, "ungated": ("b",)}, {"a": (3,), "c": (2,)}),
    "norm": ({"norm": True}, {"gate_output": True}, {"a": (3,), "b": (3,), "c": (2,)}),
}


@pytest.mark.parametrize("case", INPUT_GATED)
def test_the_mask_of_input_gates_is_what_the_output_depends_on(case):
    """A parameter is part of the network if moving it moves the output. A norm depends on all of its layer."""
    build, options, shapes = INPUT_GATED[case]
    torch.manual_seed(0)
    model = Perceptron(**build)
    gating = by_inputs(model, torch.randn(3), **options)
    assert gating.gate_shapes == shapes
    x = torch.randn(8, 3, dtype=torch.float64)
    params = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def outputs(params: Params) -> Tensor:
        out: Tensor = torch.func.functional_call(model, params, (x,))
        return out

    for values in itertools.product([0.0, 1.0], repeat=len(listed(gating))):
        gates = as_gates(gating, values)
        if not all(bool(gate.any()) for gate in gates.values()):
            continue  # the floor keeps this from happening
        gated, masks = outputs(gating.apply(params, gates)), gating.mask(gates)
        torch.testing.assert_close(outputs(gating.prune(params, gates)), gated, rtol=0, atol=1e-12)
        slopes = torch.func.jacrev(lambda p, gates=gates: outputs(gating.apply(p, gates)))(params)
        for name, slope in slopes.items():
            counts = slope.abs().amax((0, 1)) > 0
            mask = masks.get(name, torch.ones(1)).expand(counts.shape) > 0
            # What feeds a norm stays whole, and so does a layer that was to be left without gates.
            whole = (build["norm"] and name[0] in "an") or name[0] in options.get("ungated", ())
            assert bool((mask >= counts).all()) if whole else torch.equal(mask, counts), name


@pytest.mark.parametrize("gate_output", [False, True])
@pytest.mark.parametrize("build", [lambda: LeNet5(1, 16, 4), lambda: ResNet20(classes=5)], ids=["lenet", "resnet"])
def test_pruning_by_input_gates_leaves_the_gated_network_what_it_is(build, gate_output):
    torch.manual_seed(0)
    model = build()
    example = torch.randn(3 if isinstance(model, ResNet20) else 1, 16, 16)
    gating = by_inputs(model, example, gate_output=gate_output)
    params = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    x = torch.randn(4, *example.shape, dtype=torch.float64)
    draw = torch.Generator().manual_seed(1)
    for share in (0.1, 0.5):
        gates = {k: (torch.rand(s, generator=draw) < share).double() for k, s in gating.gate_shapes.items()}
        one, other = (torch.func.functional_call(model, do(params, gates), (x,)) for do in (gating.apply, gating.prune))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@settings(max_examples=5, deadline=None)
@given(probabilities=st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_a_mask_of_input_probabilities_is_the_expectation_over_all_hard_gates(probabilities):
    gating = by_inputs(Perceptron(norm=False), torch.randn(3), gate_output=True)
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in gating.shapes.items()}
    for values in itertools.product([0.0, 1.0], repeat=8):
        weight = math.prod(p if z else 1 - p for p, z in zip(probabilities, values, strict=True))
        for name, mask in gating.mask(as_gates(gating, values)).items():
            expected[name] += weight * mask
    for name, mask in gating.mask(as_gates(gating, tuple(probabilities))).items():
        torch.testing.assert_close(mask.expand(expected[name].shape), expected[name], rtol=0, atol=1e-12)


def test_a_filter_disappears_with_its_columns_and_they_with_it():
    gating = by_inputs(LeNet5(1, 16, 4), torch.randn(1, 16, 16))
    repeat = gating.gate_shapes["fc1"][0] // gating.gate_shapes["conv2"][0]
    gates = gating.all_open({"x": torch.zeros(1)})
    gates["fc1"][3 * repeat : 4 * repeat] = 0
    gates["conv2"][5] = 0
    masks = gating.mask(gates)
    left = masks["conv2.weight"].flatten(1).any(1).nonzero().flatten().tolist()
    assert left == [i for i in range(64) if i not in (3, 5)]
    columns = masks["fc1.weight"].flatten().reshape(-1, repeat)
    assert columns[[3, 5]].sum() == 0
    assert columns.sum() == 62 * repeat


def test_an_unknown_kind_of_linear_gates_is_refused():
    with pytest.raises(SettingError, match="linear_gates must be outputs or inputs"):
        find_structure(LeNet5(1, 16, 4), torch.randn(1, 16, 16), linear_gates="both")
