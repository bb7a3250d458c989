"""Both engines against numbers that are known without either: bytes, accuracies, clients that differ, divergence."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedprior
from fedprior.core import trees
from fedprior.core.errors import DivergedError, RunError
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.modes import engine
from fedprior.engines.stacked.tensors import disagreement_of, floor_flags, mean_over
from fedprior.runs.folder import RunFolder, checksum
from small_world import CLASSES

MODES = ["in-turn", "vectorised"]


def simulate(task: fedprior.Task, name: str, mode: str, settings: dict | None = None, **given: object) -> Simulation:
    chosen = fedprior.algorithm(name, task.network, **(settings or {}))
    return build(chosen, task.network, task.data, Settings(**{**task.defaults, "mode": mode, **given}))


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_a_round_are_those_of_its_messages(small_task, mode) -> None:
    """A dense message: a header of 24 bytes and four per parameter, up and down, for each of three clients."""
    sim = simulate(small_task(), "fedavg", mode)
    (record,) = engine([sim], mode).step(evaluate=False)
    size = 24 + 4 * trees.count(sim.network.params())
    assert (record["bytes_up"], record["bytes_down"]) == (3 * size, 3 * size)


@pytest.mark.parametrize("mode", MODES)
def test_each_client_trains_the_sub_network_it_was_sent(small_task, mode) -> None:
    """Where everything is left out but the floor's unit, and clients do not move, an upload is its own packet."""
    task = small_task()
    settings = {"linear_rate": 0.6, "input_rate": 0.6, "local_optimiser": "SGD(lr=0.0)"}
    sim = simulate(task, "feddrop", mode, settings, clients_per_round=6)
    before = {name: value.clone() for name, value in sim.server["weights"].items()}
    (record,) = engine([sim], mode).step(evaluate=False)
    assert record["bytes_up"] == record["bytes_down"] < 6 * (24 + 2 + 4 * trees.count(before))
    # The mean over those who have a weight is then the weight: nothing has moved, and nothing became zero.
    for name, value in sim.server["weights"].items():
        torch.testing.assert_close(value, before[name])


class Constant(nn.Module):
    """Always says the first class, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), CLASSES).float()


@pytest.mark.parametrize("mode", MODES)
def test_accuracies_are_counted_over_a_clients_own_examples(mode) -> None:
    """Clients with 1, 5, 0 and 3 test examples, of which 0, 4, none and 3 are of the class that is always said; in the
    first and last the repeated last example would add to them."""
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    labels = ([1], [0, 0, 0, 1, 0], [], [0, 0, 0])
    clients = [
        (x, torch.tensor([0, 1, 2, 3]), torch.randn(len(y), 2), torch.tensor(y, dtype=torch.int64)) for y in labels
    ]
    task = fedprior.own_task(Constant(), clients, classes=CLASSES, batch_size=2, clients_per_round=4, device="cpu")
    sim = simulate(task, "fedavg", mode, {"local_optimiser": "SGD(lr=0.0)"})
    (record,) = engine([sim], mode).step(evaluate=True)
    assert sim.accuracy.nan_to_num(-1).tolist() == [0, 0.8, -1, 1]
    assert record["local_accuracy"] == pytest.approx(0.6)
    assert record["global_accuracy"] == pytest.approx(7 / 9)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_with_only_its_loss_not_finite_is_named(small_task, mode) -> None:
    """Its weights do not move, so only the loss can tell."""

    def infinite(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y, reduction="none") + torch.where(y == CLASSES - 1, torch.inf, 0.0)

    task = small_task((4, 4, 4), loss=infinite)
    task.data.y.clamp_(max=CLASSES - 2)
    task.data.y[task.data.train[2]] = CLASSES - 1
    sim = simulate(task, "fedavg", mode, {"local_optimiser": "SGD(lr=0.0)"}, bound=0.0)
    (outcome,) = engine([sim], mode).step(evaluate=False)
    assert isinstance(outcome, DivergedError)
    assert "client 2 diverged in round 1:" in str(outcome)


@pytest.mark.parametrize("mode", MODES)
def test_the_users_module_does_not_change(small_task, mode) -> None:
    task = small_task()
    before = {name: p.detach().clone() for name, p in task.network.module.named_parameters()}
    training = task.network.module.training
    sim = simulate(task, "fedavg", mode, {"local_optimiser": "SGD(lr=0.5)"})
    engine([sim], mode).step(evaluate=True)
    assert sim.network.module is not task.network.module
    assert task.network.module.training == training
    assert all(torch.equal(p, before[name]) for name, p in task.network.module.named_parameters())
    assert any(not torch.equal(value, before[name]) for name, value in sim.server["weights"].items())


def test_stacked_runs_have_their_own_floors_and_distances() -> None:
    floored = {"floored": {"a": torch.tensor([[1.0, 0], [0, 0]]), "b": torch.tensor([[0.0, 0], [0, 1]])}}
    assert floor_flags(floored, 2).tolist() == [[True, False], [False, True]]
    once = {"floored": {"a": torch.tensor([1.0, 0]), "b": torch.tensor([0.0, 0])}}
    assert floor_flags(once, 1).tolist() == [[True, False], [False, False]]
    mine, ours = {"a": torch.tensor([[0.25], [1.0], [0.0], [0.5]])}, {"a": torch.tensor([[0.5], [0.5], [0.5], [0.5]])}
    everyone = torch.ones(2, 2, dtype=torch.bool)
    assert disagreement_of(mine, ours, everyone).tolist() == [[0.375, 0.5], [0.25, 0.5]]
    assert disagreement_of({}, {}, everyone).shape == (2, 0)
    some = torch.tensor([[True, False], [True, True]])
    assert disagreement_of(mine, ours, some).tolist() == [[0.25, 0.25], [0.25, 0.5]]
    assert mean_over(torch.tensor([[2.0, torch.nan], [2.0, 4.0]]), some).tolist() == [2, 3]


def test_clients_of_later_stacked_runs_have_their_own_examples(small_task) -> None:
    """Two stacked runs that share the examples but not who owns them: each as if alone."""
    task = small_task()
    data = task.data
    turned = replace(data, train=type(data.train).of([data.train[5 - client] for client in range(6)]))
    tests = replace(turned, test=type(data.test).of([data.test[5 - client] for client in range(6)]))
    stacked = [simulate(replace(task, data=each), "fedavg", "vectorised", seed=4) for each in (data, tests)]
    for sim in stacked:
        sim.data = replace(sim.data, x=data.x, y=data.y, test_x=data.test_x, test_y=data.test_y)
    records = engine(stacked, "vectorised").step(evaluate=True)
    for record, each in zip(records, (data, tests), strict=True):
        alone = simulate(replace(task, data=each), "fedavg", "in-turn", seed=4)
        (expected,) = engine([alone], "in-turn").step(evaluate=True)
        assert record["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
        assert record["local_accuracy"] == pytest.approx(expected["local_accuracy"])
    assert records[0]["train_loss"] != pytest.approx(records[1]["train_loss"], rel=1e-3)


def test_records_belong_to_their_checkpoint(tmp_path) -> None:
    """Line by line: a round too few, a round twice, or a number that was changed is noticed."""
    records = [{"round": n, "bytes_up": 1, "bytes_down": 2, "train_loss": 0.5} for n in (1, 2, 3)]
    folder = RunFolder(tmp_path)

    def write(lines: list[dict]) -> None:
        folder.rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(records)
    assert folder.truncate(2, checksum(records[:2]), write=False) == records[:2]
    for wrong in (records[:1], [records[0], records[0]], [records[1], records[0]], records[1:]):
        write(wrong)
        with pytest.raises(RunError, match=r"does not hold rounds 1 to 2|is not round [12]"):
            folder.truncate(2, checksum(wrong[:2]), write=False)
    write([records[0], {**records[1], "train_loss": 0.25}])
    with pytest.raises(RunError, match="does not belong"):
        folder.truncate(2, checksum(records[:2]), write=False)
