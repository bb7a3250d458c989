"""Gates assigned under a budget: held to a plain loop, to the algebra of ReLU networks, and to what was asked."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedprior
from fedprior.catalogue.algorithms import recorded_algorithm
from fedprior.catalogue.models import LeNet5, ResNet20, initialise
from fedprior.core import keys, trees
from fedprior.core.errors import FedpriorWarning, SettingError
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.engines.build import applied
from fedprior.engines.stacked.tensors import own_settings
from fedprior.priors import Narrow
from fedprior.units import UnitGating, find_structure


def net_of(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def gating_of(module: nn.Module, x: torch.Tensor) -> UnitGating:
    return UnitGating(find_structure(module, x[0]))


def by_hand(gating: UnitGating, prior: Narrow, weights, gates, goal: float):
    """The rule of `Narrow.assign` as a loop over units, sizes counted by closing each gate alone."""
    size = float(gating.effective_parameters(gates))
    worth = []
    for layer, share in prior.shares(weights).items():
        for unit in range(len(share)):
            if gates[layer][unit] > 0:
                without = {name: gate.clone() for name, gate in gates.items()}
                without[layer][unit] = 0
                cost = size - float(gating.effective_parameters(without))
                worth.append((float(share[unit]) ** 2 / cost, cost, layer, unit))
    kept = {name: gate.clone() for name, gate in gates.items()}
    gone = 0.0
    best = {layer: max(unit for unit in worth if unit[2] == layer) for layer in gates}  # the floor's
    for one in sorted(worth):
        _, cost, layer, unit = one
        if gone >= size - goal:
            break
        if one == best[layer]:
            continue
        gone += cost
        kept[layer][unit] = 0
    return kept


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(2, 9), min_size=3, max_size=4), st.floats(0.3, 1.0), st.integers(0, 1000))
def test_narrowing_equals_a_plain_loop(widths, left, seed):
    torch.manual_seed(seed)
    module = net_of(*widths).double()
    gating = gating_of(module, torch.randn(2, widths[0], dtype=torch.float64))
    prior, weights = Narrow(gating, 0.0), dict(module.named_parameters())
    weights = {name: value.detach() for name, value in weights.items()}
    gates, goal = gating.all_open(weights), left * gating.parameters
    found, floored = prior.assign(weights, gates, torch.tensor(goal, dtype=torch.float64))
    expected = by_hand(gating, prior, weights, gates, goal)
    for layer, gate in expected.items():
        assert torch.equal(found[layer], gate)
        assert floored[layer] == 0


@pytest.mark.parametrize("init", ["default", "glorot", "he"])
@pytest.mark.parametrize("asked", [0.0, 0.3, 0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("model", ["lenet5", "resnet20"])
def test_the_requested_sparsity_is_reached_within_two_points_and_no_layer_dies(model, asked, init):
    build = (lambda: LeNet5(3, 32, 10)) if model == "lenet5" else (lambda: ResNet20(3, 100))
    module = initialise(build, init, seed=3)
    network = Network(module, torch.zeros(3, 32, 32))
    prior = fedprior.algorithm("fednarrow", network, sparsity=asked).prior
    server = prior.prune(prior.init(network.params()))
    assert asked <= 1 - prior.effective_parameters(server) / prior.gating.parameters <= asked + 0.02
    # Wide layers give more than narrow ones, but none is emptied for the others; one branch of a sum may be.
    kept = [float(gate.mean()) for gate in server["open"].values()]
    assert all(gate.sum() >= 1 for gate in server["open"].values())
    assert sum(share < 0.3 * (1 - asked) for share in kept) <= (1 if model == "resnet20" else 0)


@pytest.mark.parametrize(("floor", "asked", "head"), [(8, 0.5, 1.0), (1, 0.8, 0.0)])
def test_floors_and_zero_heads_do_not_prevent_the_requested_size(floor, asked, head):
    torch.manual_seed(0)
    module = net_of(500, 16, 32, 32, 10) if floor > 1 else net_of(20, 40, 40, 5)
    with torch.no_grad():
        module[-1].weight.mul_(head)  # type: ignore[union-attr, operator]
    network = Network(module, torch.zeros(500 if floor > 1 else 20))
    prior = fedprior.algorithm("fednarrow", network, sparsity=asked, floor=floor).prior
    server = prior.prune(prior.init(network.params()))
    assert 1 - prior.effective_parameters(server) / prior.gating.parameters >= asked
    assert all(gate.sum() >= floor for gate in server["open"].values())


@pytest.mark.parametrize("floor", [1, 3])
def test_the_highest_sparsity_is_reached_with_residual_additions(floor):
    """Layers of one residual stream keep different channels, and what reads the stream hears all of them."""
    gating = UnitGating(find_structure(ResNet20(), torch.zeros(3, 32, 32)), floor=floor)
    most = Narrow(gating).most_sparse()
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        prior = Narrow(gating, sparsity=most)
        weights = {name: torch.randn(shape, generator=draw) for name, shape in gating.shapes.items()}
        left = prior.effective_parameters(prior.init(weights))
        assert 1 - left / gating.parameters >= most - 1e-12
        # Nor is it too little: units drawn at random leave no more, and nearly as much.
        zeros = {layer: torch.zeros(shape) for layer, shape in gating.gate_shapes.items()}
        any_units = {layer: torch.rand(shape, generator=draw) for layer, shape in gating.gate_shapes.items()}
        drawn = float(gating.effective_parameters(gating.floor(zeros, any_units)[0]))
        assert 0.7 * (1 - most) < drawn / gating.parameters < 1 - most + 1e-9


def test_a_channel_added_to_many_has_a_strength():
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.one, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 1, 1), nn.Linear(8 * 16, 4)

        def forward(self, x):
            return self.out(torch.relu(self.many(x) + self.one(x)).flatten(1))

    network = Network(Added(), torch.zeros(3, 4, 4))
    prior = fedprior.algorithm("fednarrow", network, sparsity=0.04).prior  # the single one stays, and so do the
    server = prior.prune(prior.init(network.params()))  # columns that read the sum
    assert 1 - prior.effective_parameters(server) / prior.gating.parameters >= 0.04


def test_strength_does_not_change_when_a_relu_network_is_rescaled():
    torch.manual_seed(1)
    module = net_of(5, 7, 6, 3).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    gating = gating_of(module, x)
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    scale = torch.rand(7, dtype=torch.float64) * 5 + 0.1
    scaled = {**weights, "0.weight": weights["0.weight"] * scale[:, None], "0.bias": weights["0.bias"] * scale}
    scaled["2.weight"] = weights["2.weight"] / scale
    outputs = [torch.func.functional_call(module, one, x) for one in (weights, scaled)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(gating.strengths(weights)["0"], gating.strengths(scaled)["0"])
    expected = [weights["0.weight"][i].square().sum() + weights["0.bias"][i] ** 2 for i in range(7)]
    readers = [weights["2.weight"][:, i].norm() for i in range(7)]
    by_loop = torch.stack([a.sqrt() * b for a, b in zip(expected, readers, strict=True)])
    torch.testing.assert_close(gating.strengths(weights)["0"], by_loop)


def test_after_dense_rounds_the_network_shrinks_at_the_requested_rate(small_task):
    task = small_task()
    algorithm = fedprior.algorithm(
        "fednarrow-unstructured",
        task.network,
        sparsity=0.6,
        dense_rounds=2,
        shrink=0.2,
        server_optimiser="Adam(lr=0.01)",
    )
    result = fedprior.run(task, algorithm, rounds=9, evaluate_every=1)
    whole = algorithm.prior.gating.parameters
    left = [1 - record["sparsity"] for record in result.records]
    for number, share in enumerate(left, start=2):  # a record is of what the next round would start with
        assert share == pytest.approx(max(0.4, 0.8 ** max(0, number - 2)), abs=1 / whole)


@pytest.mark.parametrize("most", [878_538, 400_000, 50_000])
def test_a_number_of_parameters_is_not_exceeded(most):
    network = Network(LeNet5(3, 32, 10), torch.zeros(3, 32, 32))
    prior = fedprior.algorithm("fednarrow", network, max_parameters=most).prior
    server = prior.prune(prior.init(network.params()))
    assert 0.97 * most <= prior.effective_parameters(server) <= most


def test_sparsity_zero_is_fedavg(small_task):
    task = small_task(dtype=torch.float64)
    nothing = fedprior.algorithm("fednarrow", task.network, sparsity=0.0, linear_rate=0.0, server_optimiser="none")
    found, expected = (fedprior.run(task, one, rounds=3) for one in (nothing, "fedavg"))
    for name, value in expected.simulation.server["weights"].items():
        torch.testing.assert_close(found.simulation.server["weights"][name], value)


def test_sparsity_zero_with_dropout_is_feddrop(small_task):
    """The same sub-networks by the same keys; FedDrop alone ships its weights as they are."""
    task = small_task(dtype=torch.float64)
    rates = {"linear_rate": 0.4, "server_optimiser": "Adam(lr=0.01)"}
    nothing = fedprior.algorithm("fednarrow", task.network, sparsity=0.0, conv_rate=0.3, **rates)
    dropout = fedprior.algorithm("feddrop", task.network, input_rate=0.3, output_rate=0.0, **rates)
    found, expected = (fedprior.run(task, one, rounds=4) for one in (nothing, dropout))
    assert found.summary["bytes_up"] == expected.summary["bytes_up"]
    for name, value in expected.simulation.server["weights"].items():
        torch.testing.assert_close(found.simulation.server["weights"][name], value)


def test_a_client_gets_the_share_that_the_rates_leave():
    network = Network(LeNet5(3, 32, 10), torch.zeros(3, 32, 32))
    prior = fedprior.algorithm("fednarrow", network, sparsity=0.5, conv_rate=0.2, linear_rate=0.6).prior
    server = prior.init(network.params())
    packets = [prior.broadcast(server, key) for key in keys.fold(keys.key(3), torch.arange(300))]
    for layer, rate in {"conv1": 0.2, "conv2": 0.2, "fc1": 0.6}.items():
        drawn = torch.stack([packet["gates"][layer] for packet in packets])
        assert (drawn <= server["open"][layer]).all()
        kept = drawn[:, server["open"][layer] > 0]
        spread = (rate * (1 - rate) / kept.numel()) ** 0.5
        assert float(kept.mean()) == pytest.approx(1 - rate, abs=5 * spread)
    for packet in packets[:5]:  # nothing travels that the client's draw has closed
        left = prior.gating.mask(packet["gates"])
        assert all(not (packet["weights"][name] * (1 - mask)).any() for name, mask in left.items())


def test_the_shipped_network_scales_units_by_their_mean_presence():
    torch.manual_seed(0)
    module = net_of(5, 40, 3).double()
    network = Network(module, torch.zeros(5, dtype=torch.float64))
    prior = fedprior.algorithm("fednarrow", network, sparsity=0.3, linear_rate=0.25).prior
    server = prior.init(network.params())
    x = torch.randn(7, 5, dtype=torch.float64)

    def outputs(params):
        return network.predict(params, x)

    mean = torch.stack(
        [outputs(prior.broadcast(server, key)["weights"]) for key in keys.fold(keys.key(0), torch.arange(4000))]
    ).mean(0)
    torch.testing.assert_close(outputs(trees.row(prior.predict(server), 0)), mean, rtol=0, atol=0.02)


def test_only_hidden_units_are_left_out():
    """Neither outputs nor the data's own features; and where there are no hidden neurons all get the same network."""
    network = Network(ResNet20(3, 100), torch.zeros(3, 32, 32))
    assert not recorded_algorithm("fednarrow", network, {"sparsity": 0.5, "linear_rate": 0.5}).prior.per_client
    network = Network(LeNet5(1, 28, 10), torch.zeros(1, 28, 28))
    prior = fedprior.algorithm("fednarrow", network, sparsity=0.5, linear_rate=0.5, gate_output=True).prior
    assert (prior.rate("fc1"), prior.rate("fc2")) == (0.5, 0.0)
    network = Network(net_of(5, 8, 3), torch.zeros(5))
    given = {"sparsity": 0.3, "linear_rate": 0.5, "linear_gates": "inputs"}
    assert not recorded_algorithm("fednarrow", network, given).prior.per_client


def test_a_rate_of_zero_is_not_stacked_with_others():
    network = Network(net_of(5, 8, 3), torch.zeros(5))
    priors = [fedprior.algorithm("fednarrow", network, sparsity=0.3, linear_rate=rate).prior for rate in (0.0, 0.5)]
    with pytest.raises(SettingError, match="cannot be stacked"):
        own_settings(priors, torch.zeros(()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sparsity": 1.0}, "sparsity must lie between 0 and 0."),
        ({"sparsity": 0.5, "max_parameters": 100}, "max_parameters says how large"),
        ({"max_parameters": 0}, "max_parameters must be at least 1"),
        ({"max_parameters": 1}, "sparsity must lie between 0 and 0."),
        ({"sparsity": -0.1}, "sparsity must lie"),
        ({"sparsity": 0.5, "shrink": 0.0}, "shrink must be above 0"),
        ({"sparsity": 0.5, "dense_rounds": -1}, "dense_rounds must be at least 0"),
        ({"sparsity": 0.5, "precision": -1.0}, "precision must be at least 0"),
        ({"sparsity": 0.5, "linear_rate": 1.0}, "linear_rate must be at least 0 and below 1"),
        ({"sparsity": 0.5, "conv_rate": -0.1}, "conv_rate must be at least 0 and below 1"),
        ({"sparsity": 0.5, "structured": False, "linear_rate": 0.5}, "it concerns units"),
    ],
)
def test_impossible_sizes_are_refused(small_task, wrong, words):
    with pytest.raises(SettingError, match=words):
        fedprior.algorithm("fednarrow", small_task().network, **wrong)


# ---------------------------------------------------------------------- runs of few rounds


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 8, 13, 33])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_a_short_run_still_reaches_its_size(small_task, rounds, sparsity):
    """The defaults for single weights need 34 rounds for a half, and had closed nothing after two."""
    task = small_task((4, 4, 4))
    chosen = fedprior.algorithm("fednarrow-unstructured", task.network, sparsity=sparsity)
    fitted = applied(Settings(rounds=rounds), chosen).prior
    assert not chosen.prior.settled(rounds)
    assert fitted.settled(rounds)
    assert fitted.cautions(rounds) == []
    assert fitted.settled(3 * rounds // 4 + 1)
    if rounds >= 8:
        assert fitted.dense_rounds == rounds // 4
        assert not fitted.settled(rounds // 2)


def test_two_rounds_reach_the_size(small_task):
    task = small_task((4, 4, 4))
    chosen = fedprior.algorithm("fednarrow-unstructured", task.network, sparsity=0.5)
    assert fedprior.run(task, chosen, rounds=2).summary["sparsity"] == pytest.approx(0.5, abs=0.01)


def test_explicit_settings_and_long_runs_are_not_adjusted(small_task):
    task = small_task((4, 4, 4))
    chosen = fedprior.algorithm("fednarrow-unstructured", task.network, sparsity=0.5)
    assert chosen.prior.fit(34) is chosen.prior
    own = fedprior.algorithm("fednarrow-unstructured", task.network, sparsity=0.5, dense_rounds=3)
    assert own.prior.fit(4) is own.prior
    line = r"sparsity 0\.5 would be met in round 17 with dense_rounds=3 and shrink=0\.05, but there are 4: use more"
    with pytest.warns(FedpriorWarning, match=line):
        fedprior.run(task, own, rounds=4)


def test_momentum_of_pruned_weights_does_not_affect_pruning():
    """Of a layer whose closed units an optimiser has moved, the others keep their share, and go as they would have."""
    torch.manual_seed(0)
    module = net_of(6, 30, 30, 4).double()
    gating = gating_of(module, torch.randn(2, 6, dtype=torch.float64))
    prior = Narrow(gating, 0.7, shrink=0.4)
    server = prior.prune(prior.init({name: value.detach() for name, value in module.named_parameters()}))
    clean = prior.prune(server)
    moved = {**server["weights"], "0.weight": server["weights"]["0.weight"].clone()}
    closed = server["open"]["0"] == 0
    moved["0.weight"][closed] = 100.0
    moved["2.weight"] = server["weights"]["2.weight"] + 100.0 * closed
    drifted = prior.prune({**server, "weights": moved})
    assert 0 < closed.sum() < 29
    assert any(not torch.equal(clean["open"][layer], gate) for layer, gate in server["open"].items())
    for layer, gate in clean["open"].items():
        assert torch.equal(drifted["open"][layer], gate)
    for name, value in clean["weights"].items():
        assert torch.equal(drifted["weights"][name], value)
