"""SpikeSlab against the paper's formulas, finite differences and its own distribution, in double precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprior.catalogue.models import LeNet5
from fedprior.core import keys
from fedprior.core.trees import Params, Tree, stack
from fedprior.priors import Assignment, SpikeSlab
from fedprior.priors.thresholds import hard_concrete
from fedprior.units import UnitGating, WeightGating, find_structure

T = 0.2  # softer than the paper's, so that nothing saturates and every term matters
SHAPES = {"a": (4, 3), "b": (2, 4), "bias": (4,)}


@pytest.fixture
def prior() -> SpikeSlab:
    return SpikeSlab(WeightGating(SHAPES), lambda0=0.03, precision=0.7, cross_entropy=0.4, temperature=T)


def weights(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def state(seed: int) -> Tree:
    return {"weights": weights(seed), "thresholds": {k: v for k, v in weights(seed + 100).items() if k != "bias"}}


def theta(w: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid((w.abs() - torch.log1p(v.exp())) / T)


def opened(prior: SpikeSlab, server: Tree) -> Tree:
    return {**server, "gates": prior.gating.all_open(server["weights"])}


def with_grad(tree: Tree) -> Tree:
    for section in tree.values():
        for leaf in section.values():
            leaf.requires_grad_()
    return tree


def random_gates(like: Params, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 2, v.shape, generator=generator).double() for name, v in like.items()}


def paper_penalty(prior: SpikeSlab, local: Tree, server: Tree, norms: Params) -> Tensor:
    """The paper's local objective without the data term (appendix, local loss), |w_s| inside π held at `norms`.

    Parameters without a gate are always on: π = 1, and they cost no L0 and no cross-entropy.
    """
    w_s, w = local["weights"], server["weights"]
    total = prior.precision / 2 * (w_s["bias"] - w["bias"]).square().sum()
    for name, v in server["thresholds"].items():
        pi = torch.sigmoid((norms[name] - torch.log1p(local["thresholds"][name].exp())) / T)
        prob = theta(w[name], v)
        total = total + (prior.precision / 2 * pi * (w_s[name] - w[name]).square()).sum() + prior.lambda0 * pi.sum()
        total = total - prior.cross_entropy * (pi * prob.log() + (1 - pi) * (1 - prob).log()).sum()
    return total


def test_local_penalty_and_its_gradients_equal_the_papers(prior: SpikeSlab) -> None:
    server, local = state(0), with_grad(state(1))
    packet = opened(prior, server)
    variables = [*local["weights"].values(), *local["thresholds"].values()]
    ours = -prior.tempered_log_prob(prior.expect(local, packet), packet)
    theirs = paper_penalty(prior, local, server, {k: v.detach().abs() for k, v in local["weights"].items()})
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)
    for a, b in zip(torch.autograd.grad(ours, variables), torch.autograd.grad(theirs, variables), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_local_gradients_equal_the_formulas(prior: SpikeSlab) -> None:
    """∂/∂w_s = λ π (w_s − w);  ∂/∂v_s = −π(1−π) σ(v_s)/T · (λ/2 (w_s − w)² + λ0 − κ log θ/(1−θ))."""
    server, local = state(2), with_grad(state(3))
    packet = opened(prior, server)
    (-prior.tempered_log_prob(prior.expect(local, packet), packet)).backward()
    for name, v in server["thresholds"].items():
        w_s, v_s, w = local["weights"][name].detach(), local["thresholds"][name].detach(), server["weights"][name]
        pi, prob = theta(w_s, v_s), theta(w, v)
        slope = prior.precision / 2 * (w_s - w).square() + prior.lambda0 - prior.cross_entropy * torch.logit(prob)
        expected_v = -pi * (1 - pi) * torch.sigmoid(v_s) / T * slope
        grad_w, grad_v = local["weights"][name].grad, local["thresholds"][name].grad
        torch.testing.assert_close(grad_w, prior.precision * pi * (w_s - w), rtol=0, atol=1e-8)
        torch.testing.assert_close(grad_v, expected_v, rtol=0, atol=1e-8)


def test_server_gradients_are_those_of_algorithm_1(prior: SpikeSlab) -> None:
    """∇w = z (ŵ_s − w) and ∇v = −(z (1 − θ) − (1 − z) θ) σ(v) / T, both uphill."""
    server = with_grad(state(4))
    z = random_gates(server["thresholds"], 9)
    w_hat = {name: value * z.get(name, torch.ones(())) for name, value in weights(5).items()}
    prior.log_prob(Assignment(w_hat, z), server).backward()
    for name, v in server["thresholds"].items():
        w = server["weights"][name]
        prob = theta(w.detach(), v.detach())
        grad_v = -(z[name] * (1 - prob) - (1 - z[name]) * prob) * torch.sigmoid(v.detach()) / T
        torch.testing.assert_close(w.grad, z[name] * (w_hat[name] - w.detach()), rtol=0, atol=1e-8)
        torch.testing.assert_close(v.grad, grad_v, rtol=0, atol=1e-8)
    torch.testing.assert_close(server["weights"]["bias"].grad, (w_hat["bias"] - server["weights"]["bias"]).detach())


@pytest.mark.parametrize("section", ["weights", "thresholds"])
def test_local_gradients_equal_finite_differences(prior: SpikeSlab, section: str) -> None:
    """In v directly; in w with the norm inside the gate held fixed, which is what detaching it says."""
    local, packet, step = with_grad(state(7)), opened(prior, state(6)), 1e-6
    norms_of = {name: value.detach().clone() for name, value in local["weights"].items()}

    def penalty() -> float:
        expected = prior.expect({**local, "weights": norms_of}, packet)
        return float(-prior.tempered_log_prob(expected._replace(weights=local["weights"]), packet).detach())

    (-prior.tempered_log_prob(prior.expect(local, packet), packet)).backward()
    for leaf in local[section].values():
        flat, grad = leaf.detach().view(-1), leaf.grad
        assert grad is not None
        for i in range(flat.numel()):
            middle = float(flat[i])
            flat[i] = middle + step
            up = penalty()
            flat[i] = middle - step
            down = penalty()
            flat[i] = middle
            assert float(grad.reshape(-1)[i]) == pytest.approx((up - down) / (2 * step), abs=1e-7)


def test_server_threshold_gradient_equals_finite_differences(prior: SpikeSlab) -> None:
    server, step = with_grad(state(4)), 1e-6
    upload = Assignment(weights(5), random_gates(server["thresholds"], 1))
    prior.log_prob(upload, server).backward()
    for leaf in server["thresholds"].values():
        flat, grad = leaf.detach().view(-1), leaf.grad
        assert grad is not None
        for i in range(flat.numel()):
            middle = float(flat[i])
            values = []
            for shift in (step, -step):
                flat[i] = middle + shift
                values.append(float(prior.log_prob(upload, server).detach()))
            flat[i] = middle
            assert float(grad.reshape(-1)[i]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


def test_weights_get_no_gradient_through_the_gates(prior: SpikeSlab) -> None:
    local, packet = state(1), opened(prior, state(0))
    for leaf in local["weights"].values():
        leaf.requires_grad_()
    assert not any(gate.requires_grad for gate in prior.expect(local, packet).gates.values())


@settings(deadline=None, max_examples=30)
@given(st.floats(-6, 6))
def test_hard_concrete_is_open_with_probability_pi(logit: float) -> None:
    draws = 200_000
    z = hard_concrete(torch.tensor(logit, dtype=torch.float64), keys.uniform(keys.key(3), (draws,), torch.float64))
    pi = 1 / (1 + math.exp(-logit))
    assert float((z > 0).double().mean()) == pytest.approx(pi, abs=5 * math.sqrt(pi * (1 - pi) / draws) + 1e-5)
    assert float(z.min()) >= 0
    assert float(z.max()) <= 1


def test_hard_concrete_is_the_published_formula() -> None:
    """Louizos, Welling and Kingma (2018), eqs. 10 and 11: a stretched, clipped binary concrete."""
    log_alpha, u = torch.linspace(-4, 4, 41, dtype=torch.float64), torch.linspace(0.01, 0.99, 41, dtype=torch.float64)
    beta, gamma, zeta = 2 / 3, -0.1, 1.1
    s = 1 / (1 + ((1 - u) / u * (-log_alpha).exp()) ** (1 / beta))
    # P(z > 0) = σ(log α − β log(−γ/ζ)), so this logit has that log α.
    ours = hard_concrete(log_alpha - beta * math.log(-gamma / zeta), u)
    torch.testing.assert_close(ours, (s * (zeta - gamma) + gamma).clamp(0, 1), rtol=0, atol=1e-12)


def test_relaxation_gradient_equals_finite_differences() -> None:
    u = keys.uniform(keys.key(1), (64,), torch.float64)
    logit = torch.linspace(-3, 3, 64, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda ell: hard_concrete(ell, u), logit)


def test_commit_draws_exact_bernoulli_gates(prior: SpikeSlab) -> None:
    local, packet, draws = state(1), opened(prior, state(0)), 4000
    uploads = torch.func.vmap(lambda key: prior.commit(local, packet, key))(keys.fold(keys.key(0), torch.arange(draws)))
    for name, gates in uploads["gates"].items():
        assert set(gates.unique().tolist()) <= {0.0, 1.0}
        torch.testing.assert_close(uploads["weights"][name], local["weights"][name] * gates, rtol=0, atol=0)
        pi = theta(local["weights"][name], local["thresholds"][name])
        error = 5 * (pi * (1 - pi) / draws).sqrt() + 1e-3
        assert bool(((gates.mean(0) - pi).abs() < error).all())


def test_start_is_dense_with_the_asked_probability(prior: SpikeSlab) -> None:
    large = {name: value.sign() * (value.abs() + 2) for name, value in weights(0).items()}
    for gate in prior.gates(prior.init(large)).values():
        torch.testing.assert_close(gate, torch.full_like(gate, prior.theta_start), rtol=0, atol=1e-9)


def test_closed_form_is_the_weighted_mean_and_the_mean_gate(prior: SpikeSlab) -> None:
    server = prior.init({name: value.sign() * (value.abs() + 3) for name, value in weights(0).items()})
    clients = [
        Assignment({n: v + 4 for n, v in weights(s).items()}, random_gates(server["thresholds"], s)) for s in range(5)
    ]
    solved = prior.solve(stack(clients), server)
    probabilities = prior.gates(solved)
    for name in server["thresholds"]:
        for i in range(server["thresholds"][name].numel()):
            z = torch.stack([c.gates[name].reshape(-1)[i] for c in clients])
            w = torch.stack([c.weights[name].reshape(-1)[i] for c in clients])
            kept = server["weights"][name].reshape(-1)[i]
            mean = (z * w).sum() / z.sum() if z.sum() > 0 else kept
            assert float(solved["weights"][name].reshape(-1)[i]) == pytest.approx(float(mean), abs=1e-12)
            if float(mean.abs()) > 5 * T:  # below that no positive threshold has such a probability
                clipped = float(z.mean().clamp(0.01, 0.99))
                assert float(probabilities[name].reshape(-1)[i]) == pytest.approx(clipped, abs=1e-9)


def lenet_prior() -> tuple[SpikeSlab, Tree]:
    model = LeNet5(1, 28, 10).double()
    prior = SpikeSlab(UnitGating(find_structure(model, torch.zeros(1, 28, 28, dtype=torch.float64))))
    return prior, prior.init({name: p.detach().clone() for name, p in model.named_parameters()})


def test_pruning_keeps_every_surviving_probability() -> None:
    """Losing columns must not close the units that read them."""
    prior, server = lenet_prior()
    server["thresholds"]["conv1"][:20] += 3.0
    before, pruned = prior.gates(server), prior.prune(server)
    after = prior.gates(pruned)
    assert int(prior.open_gates(pruned)[0]["conv1"].sum()) == 12
    assert bool((pruned["weights"]["conv2.weight"][:, :20] == 0).all())
    torch.testing.assert_close(after["conv2"], before["conv2"], rtol=0, atol=1e-9)
    torch.testing.assert_close(after["fc1"], before["fc1"], rtol=0, atol=1e-9)
    again = prior.prune(pruned)
    assert all(bool((again["weights"][name] == value).all()) for name, value in pruned["weights"].items())


def test_the_floor_reopens_the_best_unit_of_a_dying_layer() -> None:
    prior, server = lenet_prior()
    server["thresholds"]["conv1"] += 3.0
    server["thresholds"]["conv1"][7] -= 1.0
    pruned = prior.prune(server)
    assert pruned["floored"]["conv1"] == 1
    assert pruned["floored"]["conv2"] == 0
    gates = prior.gates(pruned)["conv1"]
    assert gates.argmax() == 7
    assert float(gates[7]) == pytest.approx(prior.theta_start)
    assert bool((pruned["weights"]["conv1.weight"][7] == server["weights"]["conv1.weight"][7]).all())


def test_switched_off_pruning_sends_everything() -> None:
    prior, server = lenet_prior()
    open_minded = SpikeSlab(prior.gating, prune_server=False)
    server["thresholds"]["conv1"][:20] += 3.0
    kept = open_minded.prune(server)
    assert all(bool((kept["weights"][name] == value).all()) for name, value in server["weights"].items())
    packet = open_minded.broadcast(kept, keys.key(0))
    assert all(bool((gate == 1).all()) for gate in packet["gates"].values())
    assert bool((open_minded.predict(kept)["conv1.weight"][0, :20] == 0).all())


def test_a_gate_that_the_server_closed_stays_closed(prior: SpikeSlab) -> None:
    server = state(0)
    gates = prior.gating.all_open(server["weights"])
    gates["a"][0] = 0
    packet = {**server, "gates": gates}
    local = prior.adopt(packet, keys.key(0), lambda _: torch.zeros(()))
    for i in range(50):
        assert bool((prior.relax(prior.expect(local, packet), packet, keys.key(i))["a"][0] == 0).all())
        assert bool((prior.commit(local, packet, keys.key(i))["gates"]["a"][0] == 0).all())


def unit_prior() -> tuple[SpikeSlab, Tree, Tree]:
    """Two hidden layers, so that weights have gates on both sides."""
    model = torch.nn.Sequential(
        *(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    ).double()
    gating = UnitGating(find_structure(model, torch.zeros(3, dtype=torch.float64)))
    prior = SpikeSlab(gating, lambda0=0.03, precision=0.7, cross_entropy=0.4, temperature=T)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    draw = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in gating.gate_shapes.items()}
    moved = {
        name: value + 0.3 * torch.randn(value.shape, generator=generator).double() for name, value in params.items()
    }
    return (
        prior,
        {"weights": params, "thresholds": draw},
        {"weights": moved, "thresholds": {k: v + 0.2 for k, v in draw.items()}},
    )


def unit_theta(state: Tree, layer: str) -> Tensor:
    rows = state["weights"][f"{layer}.weight"]
    return torch.sigmoid((rows.detach().norm(dim=1) - torch.log1p(state["thresholds"][layer].exp())) / T)


def test_unit_wise_local_gradients_are_the_papers() -> None:
    """Group g: ∂/∂w = λ π_g (w_s − w); ∂/∂v as for a weight, with the group's squared distance and its n λ0."""
    prior, server, local = unit_prior()
    packet = opened(prior, server)
    with_grad(local)
    (-prior.tempered_log_prob(prior.expect(local, packet), packet)).backward()
    for layer in ("0", "2"):
        pi, prob = unit_theta(local, layer).detach(), unit_theta(server, layer)
        squares, size = torch.zeros_like(pi), 0
        for part in ("weight", "bias"):
            leaf, w = local["weights"][f"{layer}.{part}"], server["weights"][f"{layer}.{part}"]
            away = (leaf.detach() - w).reshape(len(pi), -1)
            torch.testing.assert_close(
                leaf.grad.reshape(len(pi), -1), prior.precision * pi[:, None] * away, atol=1e-8, rtol=0
            )
            squares, size = squares + away.square().sum(1), size + away.shape[1]
        slope = prior.precision / 2 * squares + size * prior.lambda0 - prior.cross_entropy * torch.logit(prob)
        expected = -pi * (1 - pi) * torch.sigmoid(local["thresholds"][layer].detach()) / T * slope
        torch.testing.assert_close(local["thresholds"][layer].grad, expected, rtol=0, atol=1e-8)


def test_unit_wise_server_gradients_are_those_of_algorithm_1_for_what_was_sent() -> None:
    """∇w = z (ŵ_s − w), z the gate of a weight's own group: columns that read a unit closed here have their say."""
    prior, server, local = unit_prior()
    gates = {"0": torch.tensor([1.0, 0, 1, 1]).double(), "2": torch.tensor([1.0, 1, 0, 1, 1]).double()}
    upload = {"weights": prior.gating.apply(local["weights"], gates), "gates": gates}
    assignment = Assignment.of(prior.realise(upload, server), upload)
    with_grad(server)
    prior.log_prob(assignment, server).backward()
    own = {name: gates[name[0]] for name in server["weights"] if name[0] in gates}
    for name, w in server["weights"].items():
        z = own.get(name, torch.ones(1).double())
        expected = z.reshape(-1, *[1] * (w.dim() - 1)) * (local["weights"][name] - w.detach())
        torch.testing.assert_close(w.grad, expected.expand(w.shape), rtol=0, atol=1e-8)
    for layer, z in gates.items():
        prob, v = unit_theta(server, layer).detach(), server["thresholds"][layer]
        torch.testing.assert_close(v.grad, -(z - prob) * torch.sigmoid(v.detach()) / T, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dense", [0, 3])
def test_the_closed_form_slope_is_the_m_steps_gradient(dense: int) -> None:
    """Over several clients whose gates differ, one layer's thresholds being those of the dense rounds."""
    prior, server, local = unit_prior()
    prior = SpikeSlab(prior.gating, temperature=T, dense_rounds=dense)
    server["thresholds"]["0"][:2] = -100.0 if dense else -3.0
    uploads = []
    for seed in range(3):
        gates = random_gates(server["thresholds"], seed)
        moved = {name: value + 0.1 * seed for name, value in local["weights"].items()}
        uploads.append({"weights": prior.gating.prune(moved, gates), "gates": gates})
    found = prior.slope(stack(uploads), server)
    realised = [Assignment.of(prior.realise(upload, server), upload) for upload in uploads]
    with_grad(server)
    (-torch.stack([prior.log_prob(assignment, server) for assignment in realised]).mean()).backward()
    for section in ("weights", "thresholds"):
        for name, value in server[section].items():
            torch.testing.assert_close(found[section][name], value.grad, rtol=0, atol=1e-9)


def test_momentum_does_not_revive_what_was_pruned() -> None:
    prior, server = lenet_prior()
    server["thresholds"]["conv1"][:20] += 3.0
    pruned = prior.prune(server)
    theta_before = prior.gates(pruned)["conv2"]
    drifted = {**pruned, "weights": {name: value + 1e-3 for name, value in pruned["weights"].items()}}
    again = prior.prune(drifted)
    assert bool((again["weights"]["conv1.weight"][:20] == 0).all())
    assert bool((again["weights"]["conv2.weight"][:, :20] == 0).all())
    alive = {**pruned, "weights": prior.gating.prune(drifted["weights"], pruned["open"])}
    torch.testing.assert_close(prior.gates(again)["conv2"], prior.gates(alive)["conv2"], rtol=0, atol=1e-9)
    assert not torch.equal(prior.gates(again)["conv2"], theta_before)


def test_the_server_does_not_move_what_no_client_moved() -> None:
    """Not even by the last bit, of which Adam would make a step: a mean of equal numbers need not equal them."""
    module = LeNet5(1, 28, 10)
    gating = UnitGating(find_structure(module, torch.zeros(1, 28, 28)))
    prior = SpikeSlab(gating)
    params = {name: value.detach() for name, value in module.named_parameters()}
    server = prior.init(params)
    upload = {"weights": params, "gates": gating.all_open(params)}
    for count in (3, 7, 10):
        found = prior.slope(stack([upload] * count), server)["weights"]
        assert all(bool((value == 0).all()) for value in found.values())
