"""What an algorithm's messages are made of, and what rides in them: each part where the formula has it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.core import keys
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser, TreeOptimiser
from fedprior.core.trees import Params, Tree, stack
from fedprior.corrections import Correction, Scaffold
from fedprior.em import Algorithm, m_step
from fedprior.priors import FixedGates, Gaussian
from fedprior.units import UnitGating, find_structure
from fedprior.wire import Wire

SGD = {"weights": Optimiser("SGD", {"lr": 0.5})}


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def hidden(linear: str = "outputs") -> tuple[UnitGating, Params]:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    structure = find_structure(model, torch.zeros(2, dtype=torch.float64), linear_gates=linear, gate_output=True)
    return UnitGating(structure), {name: torch.ones_like(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", fedprior.ALGORITHMS)
def test_the_two_directions_have_different_fingerprints(name: str) -> None:
    """Even where both hold the same tensors: a packet sent back is no upload."""
    network = Network(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2))
    for wire in ("float32", "int8", "float32/int4"):
        algorithm = replace(fedprior.algorithm(name, network), wire=Wire.of(wire))
        server = algorithm.prior.prune(algorithm.init(network.params()))
        down, up = algorithm.downlink(server), algorithm.uplink(server)
        assert (down.direction, up.direction) == ("down", "up")
        assert down.fingerprint != up.fingerprint


def test_networks_that_differ_only_in_wiring_have_different_fingerprints() -> None:
    """The same names, shapes and gates; in one network the second layer reads the first, in the other the input."""

    class Net(nn.Module):
        def __init__(self, chained: bool) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.chained = chained

        def forward(self, x: Tensor) -> Tensor:
            first = torch.relu(self.a(x))
            result: Tensor = self.c(torch.relu(self.b(first)) if self.chained else torch.relu(self.b(x)) + first)
            return result

    prints = []
    for chained in (False, True):
        network = Network(Net(chained), torch.zeros(3))
        algorithm = fedprior.algorithm("feddrop", network)
        server = algorithm.init(network.params())
        prints.append((algorithm.downlink(server).fingerprint, algorithm.uplink(server).fingerprint))
    assert prints[0][0] != prints[1][0]
    assert prints[0][1] != prints[1][1]


# ---------------------------------------------------------------------- SCAFFOLD


def test_a_correction_covers_only_weights_that_the_client_has() -> None:
    """c − c_s on the client's sub-network: it may remember more from an earlier turn."""
    packet = {"control": {"a": numbers(5, 7), "b": numbers(1)}}
    memory = {"control": {"a": numbers(1, 2), "b": numbers(4)}}
    found = Scaffold().direction(packet, memory, {"a": numbers(1, 0)})
    assert {name: value.tolist() for name, value in found.items()} == {"a": [4, 0], "b": [-3]}


def test_the_control_variates_are_option_ii() -> None:
    """c_s⁺ − c_s = (w − φ) / (K η) − c, c ← c + |S|/N · mean, c_s ← c_s + what was sent."""
    scaffold = Scaffold()
    start, end, packet = {"a": numbers(3, 3)}, {"a": numbers(1, 4)}, {"control": {"a": numbers(0.5, 0.25)}}
    sent = scaffold.conclude(start, end, packet, torch.tensor(4.0, dtype=torch.float64))
    assert sent["control"]["a"].tolist() == [2 / 4 - 0.5, -1 / 4 - 0.25]
    kept = scaffold.keep({"control": {"a": numbers(10, 20)}}, {"control": {"a": numbers(1, 2)}}, {})
    assert kept["control"]["a"].tolist() == [11, 22]
    uploads = stack([{"control": {"a": numbers(2, 4)}}, {"control": {"a": numbers(4, 0)}}])
    server = scaffold.absorb({"weights": {}, "control": {"a": numbers(1, 1)}}, uploads, 0.1)
    torch.testing.assert_close(server["control"]["a"], numbers(1.3, 1.2))
    # Clients of one and three examples: (2 + 3 · 4) / 4 and (4 + 0) / 4.
    server = scaffold.absorb({"weights": {}, "control": {"a": numbers(1, 1)}}, uploads, 0.1, numbers(1, 3))
    torch.testing.assert_close(server["control"]["a"], numbers(1.35, 1.1))
    assert all(not value.any() for value in scaffold.init(start)["control"].values())


def test_the_corrections_part_of_a_message_is_masked_by_its_gates() -> None:
    gating, params = hidden()
    algorithm = Algorithm(FixedGates(gating, {"0": 0.0, "2": 0.0}), SGD, correction=Scaffold())
    gates = {"0": numbers(1, 0, 1), "2": numbers(1, 1)}
    upload = {"weights": params, "gates": gates}
    message = algorithm.answer(upload, {"control": params}, upload)
    assert message["control"]["0.bias"].tolist() == [1, 0, 1]
    assert message["control"]["2.weight"].tolist() == [[1, 0, 1]] * 2
    layout = algorithm.uplink({**algorithm.init(params), "gates": gates})
    control = layout.sections["control"]
    assert control.mask is not None
    assert control.mask(gates)["0.bias"].tolist() == [1, 0, 1]
    assert not control.relative, "a packet's c is nothing to take a difference to"
    assert control.negligible > 0
    assert algorithm.answer(upload, {}, upload) == upload
    dense = Algorithm(Gaussian(), SGD, correction=Scaffold())
    assert dense.answer({"weights": params}, {"control": params}, {})["control"]["0.bias"].tolist() == [1, 1, 1]


# ---------------------------------------------------------------------- the M-step


class Counting(Correction):
    """Writes down what it was told."""

    def absorb(self, server: Tree, uploads: Tree, fraction: float, weight: Tensor | None = None) -> Tree:
        return {
            **server,
            "told": {"fraction": numbers(float(fraction)), "weight": numbers() if weight is None else weight},
        }


@pytest.mark.parametrize("optimiser", [False, True])
def test_the_m_step_takes_the_mean_or_one_step_towards_it(optimiser: bool) -> None:
    """w = 1, clients at 3 and 7: their mean is 5; one SGD step of half the way is 3."""
    server = {"weights": {"a": numbers(1)}}
    uploads = stack([{"weights": {"a": numbers(3)}}, {"weights": {"a": numbers(7)}}])
    algorithm = Algorithm(Gaussian(), SGD, server=SGD if optimiser else None, correction=Counting())
    tree = TreeOptimiser(SGD, server) if optimiser else None
    found = m_step(algorithm, server, uploads, tree, 0.25)
    assert found["weights"]["a"].tolist() == [3 if optimiser else 5]
    assert found["told"]["fraction"].tolist() == [0.25]
    assert found["told"]["weight"].tolist() == []
    # Clients of one and three examples: their mean is 6, half the way to it 3.5.
    tree = TreeOptimiser(SGD, server) if optimiser else None
    found = m_step(algorithm, server, uploads, tree, 0.25, numbers(1, 3))
    assert found["weights"]["a"].tolist() == [3.5 if optimiser else 6]
    assert found["told"]["weight"].tolist() == [1, 3]
    assert server["weights"]["a"].tolist() == [1], "the server before is what it was"


def test_the_m_step_sees_the_parameters_that_an_upload_stands_for() -> None:
    """The median prior does not send what did not move: it is taken to be the server's, not zero."""
    network = Network(nn.Linear(1, 2, bias=False).double(), torch.zeros(1, dtype=torch.float64))
    algorithm = fedprior.algorithm("fedmedian", network)
    server = {"weights": {"weight": torch.tensor([[2.0], [5.0]]).double()}}
    gates = {"weight": torch.tensor([[1.0], [0.0]]).double()}
    upload = {"weights": {"weight": torch.tensor([[4.0], [0.0]]).double()}, "gates": gates}
    assert m_step(algorithm, server, stack([upload]), None)["weights"]["weight"].tolist() == [[4], [5]]
    stepping = replace(algorithm, server=SGD)
    moved = m_step(stepping, server, stack([upload]), TreeOptimiser(SGD, server))["weights"]["weight"]
    assert moved.tolist() == [[2.5], [5]]  # by the sign of the difference, half a step


def test_the_shipped_average_forgets_early_rounds() -> None:
    """w̄ ← w̄ + (w − w̄) · 20 / (t + 19): the first round replaces, the second has 20/21 of the say."""
    algorithm = Algorithm(Gaussian(), SGD, average=True)
    state = algorithm.init({"a": numbers(100)})
    for weights, expected in ((4.0, 4.0), (25.0, 24.0), (2.0, 24 - 22 * 20 / 22)):
        state = algorithm.settle({**state, "weights": {"a": numbers(weights)}})
        torch.testing.assert_close(state["average"]["a"], numbers(expected))
    torch.testing.assert_close(algorithm.predict(state)["a"], numbers(4.0)[None])
    assert replace(algorithm, average=False).predict(state)["a"].tolist() == [[2]]


def test_a_packet_holds_the_sections_of_prior_and_correction() -> None:
    _, params = hidden()
    algorithm = Algorithm(Gaussian(), SGD, correction=Scaffold())
    server = algorithm.init(params)
    server["control"] = {name: 3 * value for name, value in params.items()}
    packet = algorithm.broadcast(server, keys.key(0))
    assert set(packet) == {"weights", "control"}
    assert packet["control"]["0.bias"].tolist() == [3, 3, 3]
