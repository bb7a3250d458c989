"""Masks over fixed weights: the M-step maximises votes, weights never travel, a mask is at most a bit a weight."""

import pytest
import torch

import fedprior
from fedprior import wire
from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.priors import Assignment


def test_the_m_step_is_where_the_votes_are_likeliest(small_task):
    """Against autograd: with the undecided votes added, the slope of the log density in θ is zero."""
    network = small_task().network
    prior = fedprior.algorithm("fedpm", network, pseudo_votes=2.0).prior
    torch.manual_seed(0)
    votes = {name: (torch.rand(6, *shape) < 0.4).double() for name, shape in prior.gating.gate_shapes.items()}
    server = prior.init({name: value.double() for name, value in network.params().items()})
    solved = prior.solve(Assignment({}, votes), server)
    theta = {name: value.requires_grad_() for name, value in prior.gates(solved).items()}
    total = sum(
        (votes[name].sum(0) * t.log() + (6 - votes[name].sum(0)) * (1 - t).log()).sum() for name, t in theta.items()
    )
    total = total + sum((t.log() + (1 - t).log()).sum() for t in theta.values())  # one vote for, one against
    total.backward()
    for name, value in theta.items():
        torch.testing.assert_close(value.grad, torch.zeros_like(value), rtol=0, atol=1e-9, msg=name)


def test_the_density_is_that_of_bernoulli_draws(small_task):
    network = small_task().network
    prior = fedprior.algorithm("fedpm", network).prior
    server = prior.init({name: value.double() for name, value in network.params().items()})
    torch.manual_seed(0)
    server["belief"] = {name: 1.8 * torch.rand_like(value) - 0.9 for name, value in server["belief"].items()}
    votes = {name: (torch.rand_like(value) < 0.5).double() for name, value in server["belief"].items()}
    expected = sum(
        torch.distributions.Bernoulli(theta).log_prob(votes[name]).sum() for name, theta in prior.gates(server).items()
    )
    torch.testing.assert_close(prior.density(Assignment({}, votes), server), expected)


def test_gradients_pass_straight_through_the_draw(small_task):
    """∂loss/∂π is the loss's slope in the gate at the drawn mask, w̄ ∂loss/∂φ."""
    network = small_task().network
    prior = fedprior.algorithm("fedpm", network).prior
    packet = prior.broadcast(prior.init(network.params()), keys.key(0))
    local = prior.adopt(prior.receive(packet), keys.key(1), lambda params: torch.zeros(()))
    scores = {name: value.requires_grad_() for name, value in local["scores"].items()}
    params = prior.relax(prior.expect({"scores": scores}, packet), packet, keys.key(2))
    sum((3 * value).sum() for value in params.values()).backward()
    slab = prior.slab.on(next(iter(params.values())))
    for name, value in scores.items():
        torch.testing.assert_close(value.grad, 3 * slab[name] / 4)  # σ' = ¼ at log-odds 0
        drawn = params[name].detach() / slab[name]
        assert set(drawn.unique().tolist()) <= {0.0, 1.0}


def test_weights_never_travel_and_a_mask_takes_at_most_a_bit(small_task):
    task = small_task()
    chosen = fedprior.algorithm("fedpm", task.network, local_optimiser="Adam(lr=0.5)")
    sim = build(chosen, task.network, task.data, Settings(**task.defaults))
    weights = sum(torch.Size(shape).numel() for shape in chosen.prior.gating.gate_shapes.values())
    most = sim.settings.clients_per_round * (wire.HEADER_BYTES + (weights + 7) // 8)
    assert sim.step(evaluate=False)["bytes_up"] <= most
    sim.server["belief"] = {name: torch.full_like(value, -0.96) for name, value in sim.server["belief"].items()}
    assert sim.step(evaluate=False)["bytes_up"] < 0.75 * most  # votes that are not even need less
    slab = chosen.prior.slab.on(next(iter(sim.server["weights"].values())))
    for name, value in sim.server["weights"].items():
        assert torch.equal(value, slab[name])


def test_the_slab_is_the_same_for_all_who_have_the_seed(small_task):
    network = small_task().network
    one, two, other = (
        fedprior.algorithm("fedpm", network, slab_seed=seed).prior.slab.on(torch.ones(1)) for seed in (3, 3, 4)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    for value in one.values():
        if value.dim() > 1:
            torch.testing.assert_close(value.abs(), torch.full_like(value, 2 / value[0].numel() ** 0.5))
        else:
            assert not value.any()


def test_the_likelier_mask_can_be_shipped(small_task):
    network = small_task().network
    prior = fedprior.algorithm("fedpm", network, model="mode").prior
    server = prior.init(network.params())
    server["belief"] = {
        name: torch.where(torch.rand_like(value) < 0.3, 0.5, -0.5) for name, value in server["belief"].items()
    }
    shipped = prior.predict(server)
    for name, value in server["belief"].items():
        assert torch.equal(shipped[name][0] != 0, value > 0)
    kept = sum(int((value > 0).sum()) for value in server["belief"].values())
    assert prior.effective_parameters(server) == kept + sum(v.numel() for v in network.params().values() if v.dim() < 2)


def test_settings_out_of_range_are_refused(small_task):
    for wrong in ({"model": "median"}, {"pseudo_votes": 0.0}, {"cross_entropy": -1.0}):
        with pytest.raises(SettingError):
            fedprior.algorithm("fedpm", small_task().network, **wrong)
