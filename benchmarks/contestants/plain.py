"""A simple hand-written torch loop: a copy of the model, SGD, the mean."""

import copy
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from contestants.tasks import LR, Task, loss
from contestants.turns import Turns


def train(module: nn.Module, x: Tensor, y: Tensor, batch: int) -> None:
    """One epoch of one client."""
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)
    for rows in torch.randperm(len(y), device=y.device).split(batch):
        optimiser.zero_grad()
        loss(module(x[rows]), y[rows]).backward()
        optimiser.step()


def mean(states: Iterable[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for state in states:
        total = {name: total[name] + value if total else value for name, value in state.items()}
    return {name: value / count for name, value in total.items()}


def play(task: Task, device: str, threads: int, turns: Turns) -> None:
    torch.set_num_threads(threads)
    x, y, starts = task.data()
    x, y, server = x.to(device), y.to(device), task.module().to(device)
    random = np.random.RandomState(0)

    def trained(client: int) -> dict[str, Tensor]:
        local = copy.deepcopy(server)
        train(local, x[starts[client] : starts[client + 1]], y[starts[client] : starts[client + 1]], task.batch)
        return local.state_dict()

    for _ in turns:
        cohort = random.choice(task.clients, task.cohort, replace=False)
        server.load_state_dict(mean((trained(client) for client in cohort), task.cohort))
