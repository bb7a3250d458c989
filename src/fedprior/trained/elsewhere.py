"""Runs whose clients' examples are elsewhere, as after a deployment: the folder and your own network are enough."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprior.catalogue.tasks import Task
from fedprior.catalogue.tasks.base import task_elsewhere
from fedprior.core.errors import DataError, RunError, SettingError, described
from fedprior.core.inputs import ModelInputs, real_type
from fedprior.core.network import Network
from fedprior.runs.drive import Result
from fedprior.runs.folder import RunFolder
from fedprior.trained.compact.inputs import Reader, targets_of

Examples = tuple[ModelInputs, Tensor]
"""Inputs and targets."""
DRAWN = 64


def task_of(run: Result | Path | str, task: Task | None, network: Network | None, test: Any = None) -> Task | None:
    """The task that was passed, or one made of a run's network; `test` are examples, or a file or folder of some."""
    if network is None:
        return task
    if task is not None:
        raise SettingError("a task has its network: pass task=… or network=…, not both")
    if isinstance(run, Result):
        raise SettingError("a Result has its network: network=… is for a run's folder")
    if not isinstance(network, Network):
        raise SettingError(
            f"the network is {described(network)}; give fedprior.Network(module, example), where the example is one "
            "input without the batch dimension"
        )
    folder = RunFolder(Path(run))
    config = folder.read_config()
    name = str(config["run"].get("task", "own"))
    clients = config.get("flower", config.get("partition", {})).get("clients")
    if not isinstance(clients, int):
        raise RunError(f"{folder.config} does not say how many clients there were: pass its task (task=…)")
    return task_elsewhere(name, network, clients, test if test is None else _examples(test, network))


def _examples(test: Any, network: Network) -> Examples:
    """Examples for this network, read from a file or folder if they are not tensors yet."""
    if isinstance(test, tuple):
        return test
    path, example = Path(test), network.example
    if not isinstance(example, Tensor):
        raise DataError("files hold one input, and this network has several: pass (x, y)")
    like = targets_of(path, real_type(example))
    return Reader(tuple(example.shape), example.dtype, None).labelled(path, like)


def around(example: Tensor) -> Tensor:
    """Random inputs like an example, always the same; whole numbers may be places in a table, so they stay."""
    if not example.is_floating_point():
        return example[None]
    draw = torch.Generator().manual_seed(0)
    return example.cpu() + torch.randn(DRAWN, *example.shape, generator=draw, dtype=example.dtype)
