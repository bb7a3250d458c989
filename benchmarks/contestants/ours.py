"""fedprior, through the functions that `fedprior.run` uses."""

from functools import partial
from typing import Any

import torch

import fedprior
from contestants.tasks import LR, Task
from contestants.turns import Turns
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.modes import engine, mode_of

Runs = tuple[tuple[int, dict[str, Any]], ...]
"""The seed and the algorithm's settings of each run."""


def driver(task: Task, device: str, name: str, runs: Runs, where: str = "auto") -> Any:
    """What does a round of all these runs at each `step`; `where` is where data live."""
    x, y, starts = task.data()
    shards = Shards(torch.arange(starts[-1]), torch.tensor(starts).numpy())
    nothing = Shards(torch.zeros(0, dtype=torch.int64), torch.zeros(task.clients + 1, dtype=torch.int64).numpy())
    data = FederatedData(x, y, x[:0], y[:0], shards, nothing, task.classes)
    network = fedprior.Network(task.module(), x[0])
    simulations = []
    for seed, options in runs:
        settings = Settings(clients_per_round=task.cohort, batch_size=task.batch, seed=seed, device=device, data=where)
        algorithm = fedprior.algorithm(name, network, local_optimiser=f"SGD(lr={LR})", **options)
        simulations.append(build(algorithm, network, data, settings))
    return engine(simulations, mode_of("auto", "auto", simulations[0]))


def play(task: Task, device: str, threads: int, turns: Turns, *, name: str, runs: Runs, where: str = "auto") -> None:
    """Do rounds of one run, or of several together, each with its seed and settings."""
    torch.set_num_threads(threads)
    rounds = driver(task, device, name, runs, where)
    for _ in turns:
        rounds.step(evaluate=False)


SWEPT = tuple((seed, {"lambda0": lambda0}) for lambda0 in (5e-7, 5e-6, 5e-5) for seed in (0, 1, 2))
fedavg = partial(play, name="fedavg", runs=((0, {}),))
fedsparse = partial(play, name="fedsparse", runs=((0, {}),))
streamed = partial(play, name="fedavg", runs=((0, {}),), where="host")
sweep = partial(play, name="fedsparse", runs=SWEPT)
