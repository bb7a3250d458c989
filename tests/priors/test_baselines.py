"""Fixed gates, group lasso and mixture: what each does that no other prior does, checked directly."""

import math

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.models import LeNet5
from fedprior.core import keys
from fedprior.core.network import Network
from fedprior.core.trees import Params, stack
from fedprior.priors import Assignment, FixedGates, GroupLasso, Mixture
from fedprior.units import UnitGating, find_structure


def lenet() -> tuple[Network, UnitGating, Params]:
    model = LeNet5(1, 28, 10).double()
    network = Network(model, torch.zeros(1, 28, 28, dtype=torch.float64))
    return network, UnitGating(find_structure(model, network.example)), network.params()


def test_feddrop_has_its_rates_where_the_paper_has_them() -> None:
    """The layer that reads the input, convolutions, fully connected layers and the output, each at its own rate."""
    network, _, _ = lenet()
    chosen = fedprior.algorithm(
        "feddrop", network, conv_rate=0.2, linear_rate=0.4, input_rate=0.05, output_rate=0.03
    ).prior
    assert isinstance(chosen, FixedGates)
    assert chosen.rates == {"conv1": 0.05, "conv2": 0.2, "fc1": 0.4, "fc2": 0.03}
    without = fedprior.algorithm("feddrop", network, conv_rate=0.2, ungated=("conv1",)).prior
    assert isinstance(without, FixedGates)
    assert without.rates["conv2"] == 0.2, "it reads conv1, whether conv1 has gates or not"


def test_feddrop_drops_at_these_rates() -> None:
    _, gating, params = lenet()
    prior = FixedGates(gating, {"conv1": 0.05, "conv2": 0.2, "fc1": 0.4})
    draws = [prior.broadcast({"weights": params}, keys.key(i))["gates"] for i in range(200)]
    for layer, rate in prior.rates.items():
        kept = torch.stack([gates[layer] for gates in draws]).mean()
        count = 200 * len(draws[0][layer])
        assert float(kept) == pytest.approx(1 - rate, abs=5 * math.sqrt(rate * (1 - rate) / count))


def test_feddrop_noise_is_drawn_anew_and_keeps_the_mean() -> None:
    _, gating, params = lenet()
    rates = {"conv1": 0.3, "conv2": 0.3, "fc1": 0.5}
    packet = {"weights": params, "gates": gating.all_open(params)}
    quiet = FixedGates(gating, rates).relax(Assignment(params), packet, keys.key(0))
    assert all(torch.equal(quiet[name], value) for name, value in params.items())
    noisy = FixedGates(gating, rates, noise=True)
    draws = [noisy.relax(Assignment(params), packet, keys.key(i))["fc1.weight"] for i in range(100)]
    assert not torch.equal(draws[0], draws[1])
    # Inverted dropout: w/(1 − rate) or 0, so the mean is w again.
    assert set((draws[0][:, 0] / params["fc1.weight"][:, 0]).round(decimals=9).unique().tolist()) == {0.0, 2.0}
    ratio = torch.stack([draw[:, 0] for draw in draws]).mean(0) / params["fc1.weight"][:, 0]
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.03)  # of 51,200 that are 0 or 2: seven standard errors


def test_fedl1_penalty_is_the_sum_of_group_norms() -> None:
    _, gating, params = lenet()
    prior = GroupLasso(gating, strength=0.3)
    expected = 0.0
    for layer in ("conv1", "conv2", "fc1"):
        rows = torch.cat([params[f"{layer}.weight"].flatten(1), params[f"{layer}.bias"][:, None]], 1)
        expected += float(rows.norm(dim=1).sum())
    penalty = -prior.tempered_log_prob(Assignment(params), {"weights": params})
    assert float(penalty) == pytest.approx(0.3 * expected, abs=1e-9)


def test_fedl1_thresholds_both_sides_at_its_strength() -> None:
    _, gating, params = lenet()
    norms = gating.norms(params)["fc1"]
    strength = float(norms.median())
    prior = GroupLasso(gating, strength)
    server = prior.prune({"weights": params})
    upload = prior.commit({"weights": params}, {}, keys.key(0))
    for gates in (prior.broadcast(server, keys.key(0))["gates"], upload["gates"]):
        assert torch.equal(gates["fc1"] > 0, norms > strength)
    assert bool((upload["weights"]["fc1.weight"][norms <= strength] == 0).all())
    assert prior.effective_parameters(server) == int(gating.effective_parameters(server["open"]))


def test_fedl1_counts_absence_as_a_vote_for_zero() -> None:
    """A group that one of two clients dropped is pulled half way to zero, not left to the other client."""
    _, gating, params = lenet()
    prior = GroupLasso(gating, strength=1e-6)
    gone = {**params, "fc1.weight": params["fc1.weight"].clone(), "fc1.bias": params["fc1.bias"].clone()}
    gone["fc1.weight"][3], gone["fc1.bias"][3] = 0, 0
    uploads = stack([prior.commit({"weights": w}, {}, keys.key(0)) for w in (params, gone)])
    solved = prior.solve(Assignment.of(uploads["weights"], uploads), {"weights": params})["weights"]
    torch.testing.assert_close(solved["fc1.weight"][3], params["fc1.weight"][3] / 2)


def test_a_client_of_the_mixture_starts_at_the_component_that_explains_its_data_best() -> None:
    prior = Mixture(3, 0.5)
    packet = {"weights": {"w": torch.tensor([[5.0], [1.0], [9.0]])}}
    local = prior.adopt(packet, keys.key(0), lambda params: (params["w"] - 1.2).abs().sum())
    assert local["weights"]["w"].tolist() == [1.0]


def test_components_start_apart_and_near() -> None:
    _, _, params = lenet()
    weights = Mixture(3).init(params)["weights"]["fc1.weight"]
    assert torch.equal(weights[0], params["fc1.weight"])
    gaps = [float((weights[i] - weights[j]).norm() / weights[0].norm()) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert all(0.05 < gap < 0.3 for gap in gaps)


def test_the_ensemble_is_evaluated_and_returned_as_one() -> None:
    """The recorded accuracy, the returned module and the saved file are all of the mean probability."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(4):
        x = torch.randn(30, 5, generator=generator)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        clients.append((x[:20], y[:20], x[20:], y[20:]))
    torch.manual_seed(0)
    task = fedprior.own_task(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), clients, batch_size=5)
    chosen = fedprior.algorithm("fedmix", task.network, spread=1.0, local_optimiser="SGD(lr=0.2)")
    result = fedprior.run(task, chosen, rounds=5)
    members = result.simulation.server["weights"]

    def member(k: int, x: Tensor) -> Tensor:
        hidden = torch.relu(x @ members["0.weight"][k].T + members["0.bias"][k])
        return (hidden @ members["2.weight"][k].T + members["2.bias"][k]).softmax(-1)

    x, y = task.data.test_x, task.data.test_y
    mean = sum(member(k, x) for k in range(3)) / 3
    torch.testing.assert_close(result.model(x).exp(), mean)
    assert result.summary["global_accuracy"] == pytest.approx(float((mean.argmax(1) == y).double().mean()))
    assert len(list(result.model.parameters())) == 12


def test_a_client_of_the_laplace_prior_takes_proximal_gradient_steps() -> None:
    """One client, two steps of φ ← w + soft(φ − lr g − w, lr λ), against the same by hand."""
    generator, lr, lam = torch.Generator().manual_seed(0), 0.1, 0.1
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, generator=generator).double(), torch.tensor([0, 1] * 4)
    task = fedprior.own_task(nn.Linear(3, 2, bias=False).double(), [(x, y)], batch_size=8, epochs=2)
    chosen = fedprior.algorithm("fedmedian", task.network, precision=lam, local_optimiser=f"SGD(lr={lr})")
    w = task.network.params()["weight"]
    phi = w.clone()
    for _ in range(2):
        variable = phi.clone().requires_grad_()
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(x @ variable.T, y), variable)
        away = phi - lr * g - w
        phi = w + away.sign() * (away.abs() - lr * lam).clamp(min=0)
    ours = fedprior.run(task, chosen, rounds=1).simulation.server["weights"]["weight"]
    torch.testing.assert_close(ours, phi, rtol=0, atol=1e-12)
    moved = (phi != w).double().mean()
    assert 0 < float(moved) < 1, "some weights left the server's, some are still equal"


def test_yogi_is_the_published_update() -> None:
    """Reddi et al. (2020), FedYogi: m and v as written, no bias correction."""
    p = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    optimiser = fedprior.Optimiser("Yogi", {"lr": 0.1}).build([p])
    m = v = torch.zeros(3, dtype=torch.float64)
    expected = p.clone()
    for step in range(6):
        g = torch.tensor([1.0, -0.1 * step, 3.0 / (step + 1)], dtype=torch.float64)
        m = 0.9 * m + 0.1 * g
        v = v - 0.01 * torch.sign(v - g**2) * g**2
        expected = expected - 0.1 * m / (v.sqrt() + 1e-3)
        p.grad = g
        optimiser.step()
        torch.testing.assert_close(p, expected)
