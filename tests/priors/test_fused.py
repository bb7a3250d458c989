"""Spike and slab as a run computes it: one price per gate, gates closed for good, clients stacked; against the formula.

Biases are zero and groups are small, so that ‖w_g‖ can be written down; T is large, so that nothing saturates.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core import keys
from fedprior.core.trees import Params, Tree, stack
from fedprior.priors import Assignment, SpikeSlab
from fedprior.priors.received import Received
from fedprior.priors.thresholds import CLOSED, NO_THRESHOLD, OPEN, logits_and_gates, thresholds_for
from fedprior.units import UnitGating, WeightGating, find_structure

T, LAMBDA0, KAPPA = 0.2, 0.03, 0.4


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def tau(v: float) -> float:
    return math.log1p(math.exp(v))


def weights(seed: int) -> Params:
    draw = torch.Generator().manual_seed(seed)
    found = {
        "0.weight": torch.randn(3, 2, generator=draw).double(),
        "2.weight": torch.randn(2, 3, generator=draw).double(),
    }
    return {**found, "0.bias": torch.zeros(3).double(), "2.bias": torch.zeros(2).double()}


def by_unit(**settings: float) -> SpikeSlab:
    """Three hidden units of two weights and a bias: each gate switches three parameters."""
    gating = UnitGating(find_structure(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2)))
    return SpikeSlab(gating, **{"lambda0": LAMBDA0, "cross_entropy": KAPPA, "temperature": T, **settings})


def by_weight(**settings: float) -> SpikeSlab:
    shapes = {name: tuple(value.shape) for name, value in weights(0).items()}
    return SpikeSlab(WeightGating(shapes), **{"lambda0": LAMBDA0, "cross_entropy": KAPPA, "temperature": T, **settings})


PRIORS = {"units": (by_unit, 3), "weights": (by_weight, 1)}


def thresholds(prior: SpikeSlab, seed: int) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return {
        layer: torch.randn(shape, generator=draw).double() - 0.5 for layer, shape in prior.gating.gate_shapes.items()
    }


def state(prior: SpikeSlab, seed: int) -> Tree:
    return {"weights": weights(seed), "thresholds": thresholds(prior, seed + 50)}


def packet(prior: SpikeSlab, seed: int, closed: int = 0) -> Tree:
    """What a client receives, with the first gates of the first layer closed for good."""
    sent = state(prior, seed)
    gates = prior.gating.all_open(sent["weights"])
    next(iter(gates.values())).view(-1)[:closed] = 0
    return {**sent, "gates": gates}


def groups(prior: SpikeSlab, of: Tree) -> list[tuple[float, float]]:
    """‖w_g‖ and v_g of every gate, in order."""
    found = []
    for layer, v in of["thresholds"].items():
        rows = of["weights"][layer].reshape(-1, 1) if layer in of["weights"] else of["weights"][f"{layer}.weight"]
        found += [
            (math.sqrt(sum(x * x for x in row)), float(value))
            for row, value in zip(rows.tolist(), v.reshape(-1), strict=True)
        ]
    return found


def naive_penalty(prior: SpikeSlab, size: int, local: Tree, sent: Tree) -> float:
    """λ/2 Σ π (w_s − w)² + λ₀ Σ_g n_g π_g − κ Σ_g [π log θ + (1 − π) log(1 − θ)], gate by gate.

    A gate that the server has closed has π = θ = 0 and costs nothing. With a logit as location, π and θ are those of
    the relaxed gates: Louizos et al. (2018), eq. 12.
    """
    total, more = 0.0, 2 / 3 * math.log(11) if prior.relaxation == "location" else 0.0
    is_open = [value > 0 for gate in sent["gates"].values() for value in gate.reshape(-1).tolist()]
    pis = []
    for (norm, v), (norm_s, v_s), alive in zip(groups(prior, sent), groups(prior, local), is_open, strict=True):
        pi = sigmoid((norm_s - tau(v_s)) / T + more) if alive else 0.0
        theta = sigmoid((norm - tau(v)) / T + more)
        pis.append(pi)
        total += prior.lambda0 * size * pi
        if alive:
            total -= prior.cross_entropy * (pi * math.log(theta) + (1 - pi) * math.log(1 - theta))
    own = prior.gating.rows(prior.gating.part(torch.tensor(pis, dtype=torch.float64)))
    for name, w in sent["weights"].items():
        away = (local["weights"][name] - w).square() * own.get(name, torch.ones(()).double())
        total += prior.precision / 2 * float(away.sum())
    return total


@pytest.mark.parametrize("relaxation", ["probability", "location"])
@pytest.mark.parametrize("precision", [0.0, 0.7], ids=["fused", "term by term"])
@pytest.mark.parametrize("closed", [0, 2])
@pytest.mark.parametrize("kind", PRIORS)
def test_the_price_of_a_received_packet_equals_the_formula(
    kind: str, closed: int, precision: float, relaxation: str
) -> None:
    """With λ = 0, the default, both terms are one price per gate; with λ above 0 they are added one by one."""
    make, size = PRIORS[kind]
    prior = replace(make(precision=precision), relaxation=relaxation)
    sent, local = prior.receive(packet(prior, 1, closed)), state(prior, 2)
    assert isinstance(sent, Received)
    ours = -prior.tempered_log_prob(prior.expect(local, sent), sent)
    assert float(ours) == pytest.approx(naive_penalty(prior, size, local, sent), rel=1e-9)


@pytest.mark.parametrize("kind", PRIORS)
def test_every_setting_contributes_to_the_price(kind: str) -> None:
    """Each term alone, so that no two mistakes can hide behind each other."""
    make, size = PRIORS[kind]
    for only in ({"lambda0": 0.0}, {"cross_entropy": 0.0}, {"lambda0": 0.0, "cross_entropy": 0.0}):
        prior = make(**only)
        sent, local = prior.receive(packet(prior, 3)), state(prior, 4)
        ours = -prior.tempered_log_prob(prior.expect(local, sent), sent)
        assert float(ours) == pytest.approx(naive_penalty(prior, size, local, sent), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("precision", [0.0, 0.7], ids=["fused", "term by term"])
@pytest.mark.parametrize("kind", PRIORS)
def test_the_slope_of_the_price_equals_the_formula(kind: str, precision: float) -> None:
    """∂/∂v_s = −π (1 − π) σ(v_s)/T · (λ/2 Σ(w_s − w)² + n λ₀ − κ logit θ), for one client and for a stack of them."""
    make, size = PRIORS[kind]
    prior = make(precision=precision)
    sent, clients = packet(prior, 5), [state(prior, seed) for seed in (6, 7)]
    layers = list(prior.gating.gate_shapes)

    def penalty(v: Params, w: Params) -> Tensor:
        received = prior.receive(sent)
        return -prior.tempered_log_prob(prior.expect({"weights": w, "thresholds": v}, received), received)

    stacked = stack(clients)
    together = torch.func.vmap(torch.func.grad(penalty))(stacked["thresholds"], stacked["weights"])
    for i, local in enumerate(clients):
        found = torch.func.grad(penalty)(local["thresholds"], local["weights"])
        expected = []
        squares = [x for layer in layers for x in _squares(layer, local, sent)]
        for (norm, v), (norm_s, v_s), square in zip(groups(prior, sent), groups(prior, local), squares, strict=True):
            pi = sigmoid((norm_s - tau(v_s)) / T)
            slope = precision / 2 * square + size * LAMBDA0 - KAPPA * (norm - tau(v)) / T
            expected.append(-pi * (1 - pi) * sigmoid(v_s) / T * slope)
        ours = torch.cat([found[layer].reshape(-1) for layer in layers])
        torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-10)
        also = torch.cat([together[layer][i].reshape(-1) for layer in layers])
        torch.testing.assert_close(also, ours, rtol=1e-10, atol=1e-12)


def _squares(layer: str, local: Tree, sent: Tree) -> list[float]:
    name = layer if layer in sent["weights"] else f"{layer}.weight"
    away = (local["weights"][name] - sent["weights"][name]).square()
    return (away.reshape(-1) if name == layer else away.sum(1)).tolist()


def test_a_gate_closed_for_good_is_never_drawn_and_has_no_slope() -> None:
    prior = by_unit()
    sent = prior.receive(packet(prior, 1, closed=2))
    local = state(prior, 2)
    expected = prior.expect(local, sent)
    assert expected.gates["0"][:2].tolist() == [0, 0]
    for seed in range(20):
        assert prior.commit(local, sent, keys.key(seed))["gates"]["0"][:2].tolist() == [0, 0]
        assert not prior.relax(expected, sent, keys.key(seed))["0.weight"][:2].any()


def test_commit_opens_a_gate_where_its_draw_is_below_pi() -> None:
    prior = by_weight()
    sent, local = packet(prior, 1), state(prior, 2)
    pi = [sigmoid((norm - tau(v)) / T) for norm, v in groups(prior, local)]
    for seed in range(10):
        draws = keys.uniform(keys.key(seed), (len(pi),), torch.float64).tolist()
        upload = prior.commit(local, sent, keys.key(seed))
        z = [value for gate in upload["gates"].values() for value in gate.reshape(-1).tolist()]
        assert z == [float(u < p) for u, p in zip(draws, pi, strict=True)]


def test_the_floor_of_a_commit_takes_the_likeliest_open_gate() -> None:
    """All gates are next to impossible; the one that would be likeliest is closed for good."""
    prior = by_unit()
    local = {"weights": weights(2), "thresholds": {"0": torch.tensor([6.0, 9.0, 8.0]).double()}}
    sent = {**packet(prior, 1, closed=1)}
    upload = prior.commit(local, prior.receive(sent), keys.key(0))
    assert upload["gates"]["0"].tolist() == [0, 0, 1]
    assert upload["floored"]["0"] == 1


# ---------------------------------------------------------------------- thresholds


def test_logits_are_the_distance_to_the_threshold_over_t() -> None:
    norms, v = torch.tensor([1.0, 2.0, 0.5, 3.0]).double(), torch.tensor([0.3, -1.0, 2.0, 0.0]).double()
    logits, gates = logits_and_gates(norms, v, torch.tensor([True, True, True, False]), T, dense=False)
    expected = [(n - tau(x)) / T for n, x in zip(norms.tolist(), v.tolist(), strict=True)]
    torch.testing.assert_close(logits[:3], torch.tensor(expected[:3], dtype=torch.float64))
    assert logits[3] == CLOSED
    assert gates[3] == 0
    torch.testing.assert_close(gates[:3], torch.tensor([sigmoid(x) for x in expected[:3]], dtype=torch.float64))


def test_a_gate_without_a_threshold_yet_is_open_whatever_its_norm() -> None:
    v = torch.tensor([NO_THRESHOLD, NO_THRESHOLD + 1, 0.0]).double()
    for dense in (False, True):
        logits, gates = logits_and_gates(torch.zeros(3).double(), v, None, T, dense=dense)
        assert (logits[:2] == OPEN).tolist() == [dense, dense]
        assert gates[:2].tolist() == ([1, 1] if dense else [0.5, 0.5])
        assert float(logits[2]) == pytest.approx(-math.log(2) / T)


def test_thresholds_give_the_logits_that_were_asked_for() -> None:
    norms, logits = torch.tensor([0.5, 1.0, 2.0, 3.0]).double(), torch.tensor([-2.0, 0.0, 1.5, 4.0]).double()
    v = thresholds_for(norms, logits, T)
    torch.testing.assert_close((norms - F.softplus(v)) / T, logits)
    # τ cannot be negative: then it is the smallest there is.
    low = thresholds_for(torch.tensor([0.1]).double(), 50.0, T)
    assert 0 < float(F.softplus(low)) < 1e-7


# ---------------------------------------------------------------------- the server


def test_a_unit_is_pruned_at_epsilon_and_kept_above() -> None:
    """θ of exactly ε goes; a little more stays."""
    prior = by_unit(prune_below=0.25)
    w = {**weights(1), "0.weight": torch.tensor([[3.0, 4], [0, 2], [1, 0]]).double()}
    norms, logit = torch.tensor([5.0, 2.0, 1.0]).double(), math.log(0.25 / 0.75)
    v = thresholds_for(norms, torch.tensor([logit - 0.01, logit + 0.01, 3.0]).double(), T)
    gates, floored = prior.open_gates({"weights": w, "thresholds": {"0": v}})
    assert gates["0"].tolist() == [0, 1, 1]
    assert floored["0"] == 0
    pruned = prior.prune({"weights": w, "thresholds": {"0": v}})
    assert pruned["weights"]["0.weight"].tolist() == [[0, 0], [0, 2], [1, 0]]
    assert not pruned["weights"]["2.weight"][:, 0].any()
    assert prior.effective_parameters(pruned) == 2 * 3 + 2 * 2 + 2
    assert prior.predict(pruned)["0.weight"][0].tolist() == [[0, 0], [0, 2], [1, 0]]


def test_the_servers_floor_does_not_choose_a_unit_without_weights() -> None:
    """All θ are below ε. The unit nearest to its threshold has long lost its weights: another is kept, and opened."""
    prior = by_unit()
    w = {**weights(1), "0.weight": torch.tensor([[0.0, 0], [0, 2], [1, 0]]).double()}
    v = {"0": thresholds_for(torch.tensor([0.0, 2, 1]).double(), torch.tensor([-3.0, -9.0, -6.0]).double(), T)}
    server = prior.prune({"weights": w, "thresholds": v})
    assert server["open"]["0"].tolist() == [0, 0, 1]
    assert server["floored"]["0"] == 1
    assert float(prior.gates(server)["0"][2]) == pytest.approx(prior.theta_start)


def test_the_start_is_theta_start_in_every_group() -> None:
    prior = by_unit(theta_start=0.9)
    w = {**weights(1), "0.weight": torch.tensor([[3.0, 4], [0, 2], [1, 0]]).double()}
    torch.testing.assert_close(prior.gates(prior.init(w))["0"], torch.full((3,), 0.9).double())


def test_the_closed_form_keeps_theta_inside_its_range() -> None:
    """Three clients who all keep unit 0, of whom two keep unit 1 and none unit 2: θ = 0.9, ⅔ and 0.1."""
    prior = by_unit(theta_start=0.9)
    server = prior.prune(prior.init({**weights(1), "0.weight": 5 + weights(1)["0.weight"]}))
    uploads = []
    for z in ((1, 1, 0), (1, 1, 0), (1, 0, 0)):
        gates = {"0": torch.tensor(z).double()}
        uploads.append(Assignment(prior.gating.apply(server["weights"], gates), gates))
    solved = prior.solve(stack(uploads), server)
    torch.testing.assert_close(prior.gates(solved)["0"], torch.tensor([0.9, 2 / 3, 0.1]).double())


def test_a_gate_without_a_threshold_yet_has_no_slope_at_all() -> None:
    """Not even a tiny one: in the dense rounds an optimiser must not begin to move what is not there."""
    prior = by_unit(dense_rounds=3)
    server = {"weights": weights(1), "thresholds": {"0": torch.tensor([NO_THRESHOLD, 0.3, NO_THRESHOLD]).double()}}
    gates = {"0": torch.tensor([1.0, 0.0, 0.0]).double()}
    upload = {"weights": prior.gating.apply(weights(2), gates), "gates": gates}
    slope = prior.slope(stack([upload]), server)["thresholds"]["0"]
    assert slope[[0, 2]].tolist() == [0.0, 0.0]
    assert float(slope[1]) != 0
