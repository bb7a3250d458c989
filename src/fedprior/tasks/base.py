"""A task: a network, clients with data, and how long to train. And a user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedprior import keys
from fedprior.data import FederatedData
from fedprior.data.federated import ClientData
from fedprior.data.images import Scale
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
    scale: Scale | None = None
    """How images became inputs, for a task on images: an exported network's inputs need the same."""
    seed: int | None = None
    """That of a named task's partition and first weights; also of a run, unless it says otherwise."""


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
    if loss is cross_entropy:
        _check_targets(data)
    _try(network, data)
    data = _with_outputs(network, data, classes)
    data.check(min_examples)
    return Task(name, network, data, defaults)


def _check_targets(data: FederatedData) -> None:
    if data.y.dim() != 1:
        raise DataError(
            f"targets have shape {tuple(data.y.shape[1:])}; give one label an example, or a loss of your own"
        )
    if data.y.is_floating_point():
        raise DataError("the targets are real numbers; give labels of whole numbers, or a loss of your own")


def _try(network: Network, data: FederatedData) -> None:
    """Run the model once on two examples, as in training: it must be a function of parameters, inputs and key alone."""
    x, y = data.x[:1].repeat_interleave(2, 0), data.y[:1].repeat_interleave(2, 0)
    buffers = {name: buffer.clone() for name, buffer in network.module.named_buffers()}
    generator = torch.random.get_rng_state()
    try:
        losses = network.training_losses(network.params(), x, y, keys.key(0))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        what = (
            f"inputs of shape {tuple(data.x.shape[1:])} and {data.x.dtype} with targets of shape {tuple(y.shape[1:])}"
        )
        raise ModelError(f"the model and its loss do not run on {what}: {error}") from error
    if not isinstance(losses, Tensor) or losses.shape != (2,):
        raise ModelError('the loss must give one number an example; torch\'s losses do with reduction="none"')
    if not torch.equal(generator, torch.random.get_rng_state()):
        torch.random.set_rng_state(generator)
        raise ModelError("the model draws random numbers of its own, which no key controls; only dropout may be random")
    for name, buffer in network.module.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise ModelError(
                f"the model changes its buffer {name!r} while it trains, a state that clients do not share"
            )


def _with_outputs(network: Network, data: FederatedData, classes: int | None) -> FederatedData:
    """With class labels the model has one output a class, and no label may lie beyond."""
    if network.loss is not cross_entropy:
        return data
    outputs = network.predict(network.params(), data.x[:1])
    if outputs.dim() != 2 or (classes is not None and classes > outputs.shape[1]):
        shape = tuple(outputs.shape[1:])
        raise ModelError(f"the model's output for one example has shape {shape}, not ({classes or 'classes'},)")
    return replace(data, classes=classes if classes is not None else outputs.shape[1])
