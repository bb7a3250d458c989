"""A unit that goes takes along the columns that read it; the units that lose them must not notice, at either end."""

import pytest
import torch
from torch import nn

from fedprior.core import keys
from fedprior.core.trees import Tree
from fedprior.priors import SpikeSlab
from fedprior.priors.thresholds import thresholds_for
from fedprior.units import UnitGating, find_structure

FIRST, SECOND = "0", "2"


def prior_and_server() -> tuple[SpikeSlab, Tree]:
    """Two hidden layers. In the first, unit 0 goes in the first round and unit 1 in the second."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    gating = UnitGating(find_structure(model, torch.zeros(2).double()))
    prior = SpikeSlab(gating, temperature=0.05)
    weights = {name: torch.randn(p.shape, generator=draw).double() for name, p in model.named_parameters()}
    weights = {name: value * (0.0 if name.endswith("bias") else 1.0) for name, value in weights.items()}
    norms = {layer: weights[f"{layer}.weight"].norm(dim=1) for layer in (FIRST, SECOND)}
    logits = {FIRST: torch.tensor([-6.0, 2.0, 3.0, 4.0]).double(), SECOND: torch.tensor([1.0, -0.5, 2.0]).double()}
    thresholds = {layer: thresholds_for(norms[layer], logits[layer], 0.05) for layer in norms}
    return prior, {"weights": weights, "thresholds": thresholds}


def close(prior: SpikeSlab, server: Tree, unit: int) -> Tree:
    """The clients have voted a unit of the first layer out."""
    v = server["thresholds"][FIRST].clone()
    v[unit] += 5
    return {**server, "thresholds": {**server["thresholds"], FIRST: v}}


def client_gates(prior: SpikeSlab, server: Tree) -> Tree:
    """π of a client that has just started."""
    packet = prior.broadcast(server, keys.key(0))
    local = prior.adopt(packet, keys.key(0), lambda params: torch.zeros(()))
    return prior.inclusion(local, prior.receive(packet))


def test_lost_columns_change_no_probability_at_either_end() -> None:
    prior, server = prior_and_server()
    expected = prior.gates(server)[SECOND].clone()
    assert float(expected.min()) < 0.5, "some are in doubt"
    for number in range(3):
        server = close(prior, server, 1) if number == 1 else server
        server = prior.prune(server)
        gone = min(number, 1) + 1
        assert server["open"][FIRST].tolist() == [0.0] * gone + [1.0] * (4 - gone)
        assert not server["weights"]["2.weight"][:, :gone].any(), "what reads them goes"
        torch.testing.assert_close(prior.gates(server)[SECOND], expected, rtol=0, atol=1e-9)
        found = client_gates(prior, server)
        torch.testing.assert_close(found[SECOND], expected, rtol=0, atol=1e-9)
        assert found[FIRST][:gone].tolist() == [0.0] * gone


def test_lost_columns_still_count_in_a_groups_norm() -> None:
    """A weight that is left doubles: the norm grows by what it adds to the square, whatever has gone."""
    prior, server = prior_and_server()
    whole = server["weights"]["2.weight"].clone()
    server = prior.prune(server)
    weights = dict(server["weights"])
    weights["2.weight"] = weights["2.weight"].clone()
    weights["2.weight"][0, 3] *= 2
    moved = prior.gates({**server, "weights": weights})[SECOND]
    assert float(moved[0]) > float(prior.gates(server)[SECOND][0])
    assert moved[1:].tolist() == pytest.approx(prior.gates(server)[SECOND][1:].tolist(), abs=1e-12)
    assert bool(whole[:, 0].any())
