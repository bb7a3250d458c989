"""A task: a network, clients with data, and how long to train. And a user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fedprior.data import FederatedData
from fedprior.data.federated import ClientData
from fedprior.errors import DataError, ModelError
from fedprior.models import check_trainable
from fedprior.network import Loss, Network, cross_entropy


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
