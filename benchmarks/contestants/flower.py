"""Flower's simulation engine: one CPU per client, as many actors as CPUs, and data in a file that they share."""

import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contestants import plain
from contestants.tasks import TASKS, Task
from contestants.turns import Turns


@lru_cache(maxsize=1)
def loaded(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The data as an actor sees it, mapped into memory once."""
    arrays = [np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in "xy"]
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


@lru_cache(maxsize=1)
def module_of(name: str) -> torch.nn.Module:
    return TASKS[name].module()


def train(message: Any, context: Any, name: str, folder: str, starts: list[int], device: str) -> Any:
    """One client's turn, in an actor."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    if device == "cpu":
        torch.set_num_threads(1)
    task, (x, y) = TASKS[name], loaded(folder)
    module = module_of(name)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    rows = slice(starts[client], starts[client + 1])
    module.to(device)
    plain.train(module, x[rows].to(device), y[rows].to(device), task.batch)
    # All have the same weight, which gives the plain mean, as in the other contestants.
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(content), reply_to=message)


def play(task: Task, device: str, threads: int, turns: Turns) -> None:
    os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    for name in ("flwr", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    client_app, server_app = ClientApp(), ServerApp()

    class Waiting(FedAvg):  # type: ignore[misc]
        """FedAvg that waits for its turn before each round."""

        def configure_train(self, *arguments: Any) -> Any:
            next(turns)
            return super().configure_train(*arguments)

    with tempfile.TemporaryDirectory() as folder:
        x, y, starts = task.data()
        np.save(Path(folder) / "x.npy", x.numpy())
        np.save(Path(folder) / "y.npy", y.numpy())
        del x, y

        @client_app.train()
        def client(message: Any, context: Any) -> Any:
            return train(message, context, task.name, folder, starts, device)

        @server_app.main()
        def server(grid: Any, context: Any) -> None:
            share = task.cohort / task.clients
            strategy = Waiting(fraction_train=share, min_train_nodes=task.cohort, fraction_evaluate=0.0)
            strategy.start(grid, ArrayRecord(task.module().state_dict()), num_rounds=turns.total)
            next(turns, None)

        resources = {"num_cpus": 1, "num_gpus": 0.0 if device == "cpu" else 1 / threads}
        config = {"client_resources": resources, "init_args": {"num_cpus": threads, "logging_level": "ERROR"}}
        run_simulation(server_app, client_app, num_supernodes=task.clients, backend_config=config)
