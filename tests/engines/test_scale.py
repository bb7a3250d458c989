"""A hundred thousand clients: what is not in a round costs nothing in it."""

import time

import numpy as np
import torch
from torch import nn

import fedprior
from fedprior.catalogue.data import dirichlet
from fedprior.catalogue.tasks import Task
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.modes import engine
from fedprior.runs import checkpoint

CLIENTS = 100_000


def many(clients, seed=0):
    """A linear task of clients with two training and one test example each, dealt by Dirichlet(1)."""
    draw = np.random.RandomState(seed)
    y, test_y = draw.randint(4, size=2 * clients), draw.randint(4, size=clients)
    x, test_x = (torch.from_numpy(draw.randn(len(part), 6)).float() for part in (y, test_y))
    train, test = (Shards.of(part) for part in dirichlet(y, test_y, clients, 1.0, seed))
    data = FederatedData(x, torch.from_numpy(y), test_x, torch.from_numpy(test_y), train, test, 4)
    data.check()
    torch.manual_seed(0)
    return Task("many", Network(nn.Linear(6, 4), x[0]), data)


def seconds_a_round(task, mode):
    settings = Settings(clients_per_round=10, batch_size=2, device="cpu", mode=mode)
    driver = engine([build(fedprior.algorithm("fedavg", task.network), task.network, task.data, settings)], mode)
    times = []
    for _ in range(12):
        start = time.process_time()
        driver.step(evaluate=False)
        times.append(time.process_time() - start)
    return min(times)


def test_a_hundred_thousand_clients_start_quickly_and_cost_nothing_per_round(tmp_path):
    start = time.process_time()
    task = many(CLIENTS)
    result = fedprior.run(task, "fedavg", rounds=2, batch_size=2, device="cpu", attack="scale", attackers=0.1)
    assert time.process_time() - start < 60
    assert [record["round"] for record in result.records] == [1, 2]
    checkpoint.save(tmp_path / "c", result.simulation)
    scores = result.simulation.scores
    assert len(scores) <= 5, "accuracy, loss, and what tells whether probabilities can be believed"
    assert (tmp_path / "c").stat().st_size < (8 * len(scores) + 1) * CLIENTS, "one number per client and score, no more"
    few = many(200)
    for mode in ("in-turn", "vectorised"):
        assert seconds_a_round(task, mode) < 3 * seconds_a_round(few, mode) + 0.005


def test_clients_given_one_by_one(tmp_path):
    x, y = torch.randn(CLIENTS * 2, 3), torch.randint(2, (CLIENTS * 2,))
    start = time.process_time()
    task = fedprior.own_task(nn.Linear(3, 2), list(zip(x.split(2), y.split(2), strict=True)))
    assert time.process_time() - start < 60
    client = CLIENTS // 2
    assert torch.equal(task.data.x[task.data.train[client]], x[2 * client : 2 * client + 2])
