"""Uploads that are folded in one by one lead where those that are kept and stacked lead."""

import itertools

import pytest
import torch
from torch import nn

import fedprior
from fedprior.core import trees
from fedprior.core.settings import Settings
from fedprior.core.weighting import Share
from fedprior.em import folding, protocol
from fedprior.engines.build import build
from fedprior.priors import Prior
from fedprior.priors.gaussian import Gaussian
from test_contract import LIVELY, make_task

CASES = {
    **{name: LIVELY.get(name, {}) for name in fedprior.ALGORITHMS},
    "fedsparse, closed form": {"server_optimiser": "none", "lambda0": 1e-3},
    "fedsparse, momentum": {**LIVELY["fedsparse"], "server_optimiser": "SGD(lr=1.0, momentum=0.9)"},
    "fedsparse-sized, closed form": {**LIVELY["fedsparse-sized"], "server_optimiser": "none"},
    "fedl1, closed form": {**LIVELY["fedl1"], "server_optimiser": "none"},
    "fedl1, Adam": {**LIVELY["fedl1"], "server_optimiser": "Adam(lr=0.01)"},
    "fedmix, Adam": {"server_optimiser": "Adam(lr=0.01)"},
    "fedmedian, signs": {**LIVELY["fedmedian"], "server_optimiser": "SGD(lr=0.01)"},
    "fednarrow, Adam": {**LIVELY["fednarrow"], "server_optimiser": "Adam(lr=0.01)"},
}
WHOLE = {"fedmedian", "fedgeomedian", "fedtrim", "fedstudent", "fedmix"}
"""Those whose M-step is no sum."""


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.fc(x.flatten(1)))))


@pytest.fixture
def concluded(monkeypatch):
    """Every M-step of two rounds in doubles: what it was given, the optimiser's state before it, what came out."""

    def run(name, model=None, **settings):
        task, seen, conclude = make_task(), [], protocol.conclude
        if model is not None:
            data = task.data
            task = fedprior.Task("own", fedprior.Network(model.double(), data.x[0]), data, task.defaults)

        def spy(algorithm, server, uploads, optimiser, share, *given):
            moments = optimiser.state() if optimiser else None
            found = conclude(algorithm, server, uploads, optimiser, share, *given)
            seen.append(((algorithm, server, uploads, optimiser, share, *given), moments, found[0]))
            return found

        monkeypatch.setattr(protocol, "conclude", spy)
        chosen = fedprior.algorithm(name.partition(",")[0], task.network, **CASES.get(name, {}))
        simulation = build(chosen, task.network, task.data, Settings(**{**task.defaults, "bound": 0.0, **settings}))
        for _ in range(2):
            simulation.step(evaluate=False)
        return seen

    return run


def folded(given, moments, order=None):
    algorithm, server, uploads, optimiser, (fraction, weight), *rest = given
    sums, rows = folding.Sums(), range(len(next(trees.leaves(uploads))[1]))
    for row in order or rows:
        upload = trees.tree_map(lambda leaf, row=row: leaf[row], uploads)
        folding.fold(algorithm, server, sums, upload, 1.0 if weight is None else float(weight[row]))
    if optimiser:
        optimiser.load_state(moments)
    return protocol.conclude_folded(algorithm, server, sums, optimiser, Share(fraction), *rest[:1])


def apart(one, other):
    """The largest difference, relative to the largest number of a tensor."""
    found, known = dict(trees.leaves(one)), dict(trees.leaves(other))
    assert found.keys() == known.keys()
    ratios = [float((found[n] - v).abs().max() / v.abs().max().clamp(min=1e-3)) for n, v in known.items() if v.numel()]
    return max(ratios)


@pytest.mark.parametrize("weighting", ["examples", "equal"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in WHOLE])
def test_folded_equals_stacked(name, weighting, concluded):
    steps = concluded(name, weighting=weighting)
    assert len(steps) == 2
    for given, moments, known in steps:
        assert folding.obstacle(given[0], given[1]) == ""
        assert (given[4].weight is None) == (weighting == "equal")
        state, fine, *_ = folded(given, moments)
        assert bool(fine)
        assert apart(state, known) < 1e-9  # both in double precision


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_what_is_no_sum_says_so(name, concluded):
    (given, *_), *_ = concluded(name)
    assert "is not made of sums" in folding.obstacle(given[0], given[1])


@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])
def test_statistics_of_norms_are_pooled_as_ever(name, concluded):
    for given, moments, known in concluded(name, WithNorm()):
        assert "statistics" in known
        assert apart(folded(given, moments)[0], known) < 1e-9


def test_in_single_precision_the_order_of_arrival_does_not_matter(concluded):
    """Sums are kept in double precision, which leaves no trace of the order in the numbers that come of them."""
    (given, moments, _), *_ = concluded("fedavg")
    single = (given[0], *trees.tree_map(torch.Tensor.float, given[1:3]), *given[3:])
    states = [folded(single, moments, order)[0] for order in itertools.permutations(range(3))]
    assert next(trees.leaves(states[0]))[1].dtype == torch.float32
    for state in states[1:]:
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(trees.leaves(states[0]), trees.leaves(state), strict=True)
        )
    stacked = protocol.conclude(*single)[0]
    assert apart(states[0], stacked) < 1e-6


def test_a_prior_that_changes_the_closed_form_inherits_no_evidence():
    class Other(Gaussian):
        def solve(self, assignments, server, weight=None):
            return server

    class Both(Gaussian):
        def solve(self, assignments, server, weight=None):
            return server

        def conclude(self, evidence, server, clients):
            return server

    assert Gaussian.additive
    assert not Prior.additive
    assert not Other.additive
    assert Both.additive
