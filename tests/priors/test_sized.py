"""A learned size: it is met from any initialisation, the votes decide, and once it is met nobody votes."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import fedprior
from fedprior.catalogue.models import LeNet5, ResNet18, ResNet20, initialise
from fedprior.catalogue.models.initialise import INITIALISATIONS
from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.priors import Assignment, Sized

MODELS = {
    "lenet5": (lambda: LeNet5(channels=1, side=28, classes=10), (1, 28, 28)),
    "resnet20": (lambda: ResNet20(channels=3, classes=10, norm="batch"), (3, 8, 8)),
    "resnet18": (lambda: ResNet18(channels=3, classes=10), (3, 8, 8)),
}


@pytest.mark.parametrize("init", INITIALISATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_every_asked_size_is_reached_within_a_point_and_no_layer_dies(model, init):
    """With votes at random, over a schedule of four rounds: only the server's side, which decides the size."""
    make, shape = MODELS[model]
    network = Network(initialise(make, init, 0), torch.zeros(shape))
    for sparsity in (0.5, 0.8, 0.9, 0.95):
        prior = fedprior.algorithm("fedsparse-sized", network, sparsity=sparsity).prior.fit(40)
        assert isinstance(prior, Sized)
        server, draw = prior.init(network.params()), torch.Generator().manual_seed(0)
        for _ in range(prior.closing_rounds + 1):
            server = prior.prune(server)
            server["votes"] = {name: torch.rand(v.shape, generator=draw) for name, v in server["votes"].items()}
        gone = 1 - prior.effective_parameters(server) / prior.gating.parameters
        assert sparsity - 1e-6 <= gone <= sparsity + 0.01, sparsity
        assert all(bool(gate.any()) for gate in server["open"].values())


def small(**settings: object) -> tuple[Network, Sized]:
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double(), torch.zeros(6).double())
    prior = fedprior.algorithm("fedsparse-sized", network, **{"sparsity": 0.5, **settings}).prior
    assert isinstance(prior, Sized)
    return network, prior


def test_the_units_with_the_fewest_votes_close():
    """All units of one layer cost the same, so the order is that of the votes, whatever the weights."""
    network, prior = small()
    server = prior.fit(10).init(network.params())
    votes = torch.tensor([0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4, 0.95, 0.05]).double()
    server = {**server, "votes": {"0": votes}, "age": {"rounds": torch.tensor(5.0).double()}}
    kept = prior.fit(10).prune(server)["open"]["0"] > 0
    assert 0 < int(kept.sum()) < 10
    assert votes[kept].min() > votes[~kept].max()


def test_the_votes_are_a_running_mean_in_closed_form_and_by_a_step():
    network, prior = small(recall=0.75, server_optimiser="SGD(lr=1.0)")
    algorithm = fedprior.algorithm("fedsparse-sized", network, recall=0.75, server_optimiser="SGD(lr=1.0)")
    server = prior.prune(prior.init(network.params()))
    cast = (torch.rand(4, 10) < 0.6).double()
    weights = {name: torch.randn(4, *value.shape).double() for name, value in network.params().items()}
    sent = torch.func.vmap(prior.gating.prune)(weights, {"0": cast})
    solved = prior.solve(Assignment(sent, {"0": cast}), server)
    torch.testing.assert_close(solved["votes"]["0"], 0.75 * server["votes"]["0"] + 0.25 * cast.mean(0))
    slope = prior.slope({"weights": sent, "gates": {"0": cast}}, server)
    assert algorithm.server is not None
    stepped = server["votes"]["0"] - algorithm.server["votes"].lr * slope["votes"]["0"]
    torch.testing.assert_close(stepped, solved["votes"]["0"])
    # The step on weights is the slope of the density, here by autograd.
    w = {name: value.clone().requires_grad_() for name, value in server["weights"].items()}
    each = [
        prior.density(Assignment({k: v[i] for k, v in sent.items()}, {"0": cast[i]}), {"weights": w}) for i in range(4)
    ]
    torch.stack(each).mean().backward()
    for name, value in w.items():
        torch.testing.assert_close(slope["weights"][name], -value.grad, msg=name)


def test_a_unit_that_was_left_out_is_not_voted_down():
    """With dropout of half of the neurons, a unit that every client who had it wants has all the votes."""
    network, prior = small(linear_rate=0.5)
    server = prior.prune(prior.init(network.params()))
    cast = torch.zeros(10, 10).double()
    cast[:5] = 1.0
    weights = {name: torch.zeros(10, *value.shape).double() for name, value in network.params().items()}
    solved = prior.solve(Assignment(weights, {"0": cast}), server)
    torch.testing.assert_close(solved["votes"]["0"], torch.ones(10).double())


def test_nobody_votes_once_the_size_is_met(small_task):
    task = small_task()
    chosen = fedprior.algorithm("fedsparse-sized", task.network, sparsity=0.5, closing=0.2)
    sim = build(chosen, task.network, task.data, Settings(**{**task.defaults, "rounds": 10}))
    records = [sim.step(evaluate=True) for _ in range(6)]
    assert records[0]["tv_max"] > 0
    assert [r["tv_max"] for r in records[3:]] == pytest.approx([0.01] * 3, abs=1e-6)  # all gates at 1, θ is 0.99
    packet = sim.algorithm.prior.receive(
        sim.algorithm.prior.broadcast(sim.algorithm.prior.prune(sim.server), keys.key(0))
    )
    local = sim.algorithm.prior.adopt(packet, keys.key(1), lambda params: torch.zeros(()))
    opened = packet.known.is_open
    assert bool((sim.algorithm.prior.expect(local, packet).joint["gates"][opened] == 1).all())
    assert records[-1]["sparsity"] >= 0.5


def test_the_schedule_begins_dense_ends_at_the_size_and_never_rises():
    _, prior = small(sparsity=0.6, closing=0.5)
    prior = prior.fit(20)
    goals = [float(prior._goal(torch.tensor(float(number)))) / prior.gating.parameters for number in range(1, 21)]
    assert goals[0] == pytest.approx(1)
    assert goals[10:] == pytest.approx([0.4] * 10)
    assert all(a >= b for a, b in pairwise(goals))
    assert not prior.settled(10)
    assert prior.settled(11)


def test_settings_out_of_range_and_a_size_asked_of_the_papers_are_refused():
    network, _ = small()
    for wrong in ({"closing": 0.0}, {"closing": 1.5}, {"recall": 1.0}, {"sparsity": 1.2}, {"temperature": 0.0}):
        with pytest.raises(SettingError):
            fedprior.algorithm("fedsparse-sized", network, **wrong)
    with pytest.raises(SettingError, match="take fedsparse-sized"):
        fedprior.algorithm("fedsparse", network, sparsity=0.5)
