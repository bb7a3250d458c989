"""Which gates closed, layer by layer, and whether by votes or by the server's step."""

import pytest
import torch

import fedprior
from fedprior.core.network import Network
from fedprior.priors import SpikeSlab
from fedprior.priors.thresholds import thresholds_for


@pytest.fixture
def prior_and_server():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).double()
    network = Network(module, torch.zeros(6, dtype=torch.float64))
    prior = fedprior.algorithm("fedsparse", network, theta_start=0.9, temperature=0.01).prior
    return prior, prior.prune(prior.init(network.params()))


def moved(server, unit: int, shrunk: float, raised: float):
    """A unit's norm falls by so much, and its threshold rises by so much."""
    weights = {name: value.clone() for name, value in server["weights"].items()}
    weights["0.weight"][unit] *= 1 - shrunk / weights["0.weight"][unit].norm()  # a bias is no part of the norm
    tau = torch.nn.functional.softplus(server["thresholds"]["0"])
    tau[unit] += raised
    return {**server, "weights": weights, "thresholds": {"0": thresholds_for(tau, 0.0, 1.0)}}


# With T = 0.01 a gate goes from θ = 0.9 to 0.1 where ‖w‖ − τ falls by 0.01 · 2 logit 0.9 = 0.044.
@pytest.mark.parametrize(
    ("shrunk", "raised", "cause"),
    [
        (0.0, 0.05, "votes"),
        (0.05, 0.0, "step"),
        (0.02, 0.03, "votes"),
        (0.03, 0.02, "step"),
        (-0.1, 0.15, "votes"),
        (0.15, -0.1, "step"),
        (0.02, 0.02, None),
        (-0.1, 0.1, None),
    ],
)
def test_a_gates_closing_is_attributed_to_its_larger_change(prior_and_server, shrunk, raised, cause):
    prior, server = prior_and_server
    for unit in range(5):
        after = moved(server, unit, shrunk, raised)
        found = prior.tally(prior.prune(prior.closures(server, after, solved=False)))
        closed = {"votes": 0, "step": 0} | ({cause: 1} if cause else {})
        assert found == {"units/0": 4 if cause else 5, **{f"closed_by_{name}/0": n for name, n in closed.items()}}
        solved = prior.tally(prior.closures(server, after, solved=True))
        assert (solved["closed_by_votes/0"], solved["closed_by_step/0"]) == (1 if cause else 0, 0)


def test_counts_add_up_over_rounds(prior_and_server):
    prior, server = prior_and_server
    for unit, (shrunk, raised) in enumerate([(0.05, 0.0), (0.0, 0.05), (0.0, 0.05)]):
        server = prior.prune(prior.closures(server, moved(server, unit, shrunk, raised), solved=False))
    assert prior.tally(server) == {"units/0": 2, "closed_by_votes/0": 2, "closed_by_step/0": 1}


@pytest.mark.parametrize("changes", [{}, {"server_optimiser": "none"}, {"dense_rounds": 2}, {"structured": False}])
def test_every_unit_is_open_or_has_a_cause_of_closing(small_task, changes):
    task = small_task(dtype=torch.float64)
    quick = {} if "server_optimiser" in changes else {"server_threshold_optimiser": "Adamax(lr=0.1)"}
    settings = {"lambda0": 1e-3, **quick, **changes}
    algorithm = fedprior.algorithm("fedsparse", task.network, **settings)
    assert isinstance(algorithm.prior, SpikeSlab)
    result = fedprior.run(task, algorithm, rounds=8, evaluate_every=1)
    units = {layer: torch.Size(shape).numel() for layer, shape in algorithm.prior.gating.gate_shapes.items()}
    for record in result.records:
        for layer, count in units.items():
            found = [record[f"{name}/{layer}"] for name in ("units", "closed_by_votes", "closed_by_step")]
            assert all(isinstance(number, int) for number in found)
            assert sum(found) == count
    last = result.records[-1]
    assert sum(last[f"units/{layer}"] for layer in units) < sum(units.values()), "nothing closed, so this tests nothing"
    if "server_optimiser" in changes:
        assert not any(last[f"closed_by_step/{layer}"] for layer in units)
