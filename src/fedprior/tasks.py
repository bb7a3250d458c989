"""Tasks: a network, clients with data, and how long to train. Named ones, and a user's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fedprior.data import FederatedData, dirichlet
from fedprior.data.embedded import mnist_mini as embedded_digits
from fedprior.data.federated import ClientData, Shards
from fedprior.errors import DataError, ModelError
from fedprior.models import LeNet5, check_trainable, initialise
from fedprior.network import Loss, Network, cross_entropy
from fedprior.settings import nearest, resolve


@dataclass(frozen=True)
class Task:
    """Something to learn. `defaults` are settings of the run, `algorithms` settings of an algorithm on this task."""

    name: str
    network: Network
    data: FederatedData
    defaults: Mapping[str, Any] = field(default_factory=dict)
    algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """How a named task was built, for its config."""


def own_task(
    model: nn.Module,
    clients: Sequence[ClientData],
    *,
    name: str = "own",
    loss: Loss = cross_entropy,
    classes: int | None = None,
    min_examples: int = 2,
    **defaults: Any,
) -> Task:
    """A task from your own module and one `(x, y)` or `(x, y, test_x, test_y)` a client.

    `defaults` are settings of a run: rounds, batch_size, epochs, clients_per_round, …
    """
    check_trainable(model)
    data = FederatedData.from_clients(clients, classes=classes, min_examples=min_examples)
    network = Network(model, data.x[0], loss)
    data = _with_outputs(network, data, classes)
    data.check(min_examples)
    return Task(name, network, data, defaults)


def _with_outputs(network: Network, data: FederatedData, classes: int | None) -> FederatedData:
    """Try the model on one example. With class labels it has one output a class, and no label may lie beyond."""
    try:
        outputs = network.predict(network.params(), data.x[:1])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        what = f"an input of shape {tuple(data.x.shape[1:])} and {data.x.dtype}"
        raise ModelError(f"the model does not run on {what}: {error}") from error
    if network.loss is not cross_entropy or data.y.dim() != 1:
        return data
    if outputs.dim() != 2 or (classes is not None and classes > outputs.shape[1]):
        shape = tuple(outputs.shape[1:])
        raise ModelError(f"the model's output for one example has shape {shape}, not ({classes or 'classes'},)")
    if data.y.is_floating_point():
        raise DataError("the targets are real numbers; give labels of whole numbers, or a loss of your own")
    return replace(data, classes=classes if classes is not None else outputs.shape[1])


def mnist_mini(
    seed: int, *, clients: int = 100, alpha: float = 10.0, init: str = "glorot", validation: bool = False
) -> Task:
    """LeNet-5 on 12,000 embedded MNIST digits, divided by Dirichlet(α) among clients.

    With `validation` the last 2,000 training images take the place of the test set: tune with it.
    """
    images = embedded_digits(validation)
    train, test = dirichlet(images.y, images.test_y, clients, alpha, seed)
    data = FederatedData(
        images.x,
        torch.from_numpy(images.y),
        images.test_x,
        torch.from_numpy(images.test_y),
        Shards.of(train),
        Shards.of(test),
        classes=10,
    )
    data.check()
    model = initialise(lambda: LeNet5(channels=1, side=28, classes=10), init, seed)
    return Task(
        "mnist-mini",
        Network(model, images.x[0]),
        data,
        defaults={"rounds": 40, "batch_size": 10, "evaluate_every": 5},
        # As in the paper, every method that compares with FedSparse has Adam at the server. Rates were chosen on a
        # part of the training set; see docs/tasks.md.
        algorithms={
            name: {"server_optimiser": "Adam(lr=0.003)"} | more
            for name, more in {
                "fedavg": {},
                "fedprox": {},
                "feddrop": {},
                "fedl1": {},
                "fedsparse": {"server_threshold_optimiser": "Adamax(lr=0.0175)"},
            }.items()
        },
        options={"clients": clients, "alpha": alpha, "init": init, "validation": validation},
    )


TASKS: dict[str, Callable[..., Task]] = {"mnist-mini": mnist_mini}


def task_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a named task, those not given at their defaults."""
    if name not in TASKS:
        raise nearest(name, TASKS, "task")
    return resolve(TASKS[name], given, f"task {name}")


def task(name: str, seed: int = 0, **options: Any) -> Task:
    """A named task: `task("mnist-mini", seed=1, alpha=0.5)`."""
    resolved = task_options(name, options)
    return TASKS[name](seed, **resolved)
