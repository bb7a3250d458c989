"""Whose draws are whose: every draw of an E-step has the key of its purpose, round, client and step, and no other."""

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.core import keys
from fedprior.core.keys import Purpose, Turn, fold, key
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser
from fedprior.core.trees import Params, Tree
from fedprior.corrections import Scaffold
from fedprior.em import Algorithm, e_step
from fedprior.engines.batches import ClientBatches, Workload
from fedprior.priors import Assignment, Gaussian, SpikeSlab
from fedprior.units import UnitGating, find_structure
from fedprior.wire import Wire

SGD = {"weights": Optimiser("SGD", {"lr": 0.1})}
ROUND, CLIENT = 3, 1


def own(purpose: Purpose) -> int:
    """run → purpose → round → client."""
    return int(fold(fold(fold(key(0), purpose), ROUND), CLIENT))


class Recording(Gaussian):
    """Writes down the keys that it is given."""

    seen: dict[str, list[int]]

    def adopt(self, packet: Tree, key: Tensor, explain: object) -> Tree:
        self.seen.setdefault("adopt", []).append(int(key))
        return super().adopt(packet, key, explain)  # type: ignore[arg-type]

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        self.seen.setdefault("relax", []).append(int(key))
        return super().relax(expected, packet, key)

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        self.seen.setdefault("commit", []).append(int(key))
        return super().commit(local, packet, key)


def data() -> fedprior.FederatedData:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 3, generator=draw), torch.arange(6) % 2) for _ in range(2)]
    return fedprior.FederatedData.from_clients(clients)


def test_an_e_step_draws_by_purpose_round_client_and_step(monkeypatch) -> None:
    """Three steps, dropout and a rounded upload."""
    drawn: dict[str, list[int]] = {"dropout": [], "uniform": []}
    for name, kept in drawn.items():
        original = getattr(keys, name)

        def recorded(*args: object, original=original, kept=kept, name=name) -> Tensor:
            kept.append(int(args[1] if name == "dropout" else args[0]))
            return original(*args)

        monkeypatch.setattr(keys, name, recorded)
    network = Network(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)), torch.zeros(3))
    prior = Recording()
    object.__setattr__(prior, "seen", {})
    algorithm = Algorithm(prior, SGD, wire=Wire.of("int8"))
    turn = Turn(key(0), ROUND, CLIENT)
    batches = ClientBatches(data(), CLIENT, Workload(2), turn.key(Purpose.BATCHES))
    e_step(algorithm, network, algorithm.broadcast(algorithm.init(network.params()), key(9)), batches, turn, {})
    steps = range(3)
    assert prior.seen["adopt"] == [own(Purpose.ADOPT)]
    assert prior.seen["commit"] == [own(Purpose.COMMIT)]
    assert prior.seen["relax"] == [int(fold(torch.tensor(own(Purpose.RELAX)), step)) for step in steps]
    first = [fold(fold(torch.tensor(own(Purpose.DROPOUT)), step), 1) for step in steps]
    assert drawn["dropout"] == [int(each) for each in first]
    rounding = fold(torch.tensor(own(Purpose.ROUNDING)), 0)
    assert drawn["uniform"][-1] == int(rounding)
    assert drawn["uniform"].count(int(rounding)) == 1


def test_every_purpose_has_its_own_number() -> None:
    """Of two names for one number the second is an alias, which no loop over purposes sees."""
    assert len(Purpose) == len(Purpose.__members__)


def test_dropout_keeps_draws_at_or_above_the_rate_and_preserves_the_mean() -> None:
    x = torch.ones(5000, dtype=torch.float64)
    found = keys.dropout(x, key(1), 0.2)
    kept = keys.uniform(key(1), (5000,), torch.float64) >= 0.2
    assert torch.equal(found, kept / 0.8)
    assert float(found.mean()) == pytest.approx(1, abs=5 * 0.5 / 5000**0.5)


def test_the_recorded_loss_excludes_the_penalty() -> None:
    """w = 0 learns 1 from x = 1 by steps of a quarter of the slope: losses 1 and ¼, whatever the prior's pull is."""
    x, y = torch.ones(2, 1).double(), torch.ones(2, 1).double()
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    task = fedprior.own_task(
        model,
        [(x, y)] * 2,
        loss=lambda outputs, targets: (outputs - targets).square().mean(1),
        batch_size=2,
        epochs=2,
        clients_per_round=2,
        device="cpu",
    )
    for mode in ("in-turn", "vectorised"):
        chosen = fedprior.algorithm("fedprox", task.network, precision=0.5, local_optimiser="SGD(lr=0.25)")
        result = fedprior.run(task, chosen, rounds=1, mode=mode)
        assert result.records[0]["train_loss"] == pytest.approx(0.625, rel=1e-12)


def test_controls_of_pruned_weights_have_no_effect() -> None:
    """A control variate on a column that was pruned would grow the norm of its group, and so the gate's probability."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    network = Network(model, torch.zeros(3).double())
    prior = SpikeSlab(UnitGating(find_structure(model, network.example)), temperature=0.3)
    local = {"weights": SGD["weights"], "thresholds": Optimiser("SGD", {"lr": 0.1})}
    algorithm = Algorithm(prior, local, correction=Scaffold())
    server = algorithm.init(network.params())
    server["thresholds"]["0"][1] += 30
    server = prior.prune(server)
    assert server["open"]["0"].tolist() == [1, 0, 1, 1]
    packet = algorithm.broadcast(server, key(0))
    turn = Turn(key(0), ROUND, CLIENT)
    steps = []
    for hidden in (0.0, 3.0):
        control = {name: 0.1 * torch.ones_like(value) for name, value in server["weights"].items()}
        control["0.weight"][1] += hidden
        control["2.weight"][:, 1] += hidden
        clients = data()
        batches = ClientBatches(clients, CLIENT, Workload(2), turn.key(Purpose.BATCHES))
        batches.data = clients.__class__(
            clients.x.double(), clients.y, clients.test_x, clients.test_y, clients.train, clients.test, clients.classes
        )
        steps.append(e_step(algorithm, network, packet, batches, turn, {"control": control}))
    for layer, pi in steps[0].gates.items():
        assert torch.equal(steps[1].gates[layer], pi)
    for name, value in steps[0].upload["weights"].items():
        assert torch.equal(steps[1].upload["weights"][name], value)
