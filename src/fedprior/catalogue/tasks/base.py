"""A task: a network, clients with data, and how long to train. `own_task` makes one from a user's own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprior.catalogue.algorithms import run_settings
from fedprior.catalogue.data.images import Scale
from fedprior.catalogue.data.text import Alphabet
from fedprior.core import keys
from fedprior.core.errors import DataError, ModelError, SettingError, described
from fedprior.core.federated import ClientData, FederatedData, Shards
from fedprior.core.inputs import ModelInputs, Several, as_inputs
from fedprior.core.metrics import one_each, with_classes
from fedprior.core.network import IGNORED, Loss, Metric, Network, Whole, class_dim, cross_entropy
from fedprior.core.trainable import check_trainable


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
    scale: Scale | Alphabet | None = None
    """How images, or characters, became inputs: an exported network's inputs need the same."""
    seed: int | None = None
    """The seed of a named task's partition and initial weights; also of a run, unless it says otherwise."""

    def __repr__(self) -> str:
        """One line, not all examples."""
        return f"Task({self.name!r}, {self.network!r}, {self.data!r})"


def own_task(
    model: nn.Module,
    clients: Sequence[ClientData],
    *,
    name: str = "own",
    loss: Loss = cross_entropy,
    metrics: Mapping[str, Metric | Whole] | None = None,
    classes: int | None = None,
    min_examples: int = 2,
    **defaults: Any,
) -> Task:
    """A task from your own module and one `(x, y)` or `(x, y, test_x, test_y)` per client.

    `metrics` are functions of outputs and targets that give one number per example, or a mean over examples; or a
    `Whole`, for what is no mean over examples. They are recorded as `global_NAME` and `local_NAME`. `defaults` are
    settings of a run: rounds, batch_size, epochs, clients_per_round, …
    """
    check_trainable(model)
    functions = check_metrics(metrics)
    run_settings(defaults)  # refused here rather than at the run
    # Only with the default loss must whole numbers be labels.
    labels = classes if classes is not None or loss is cross_entropy else 0
    data = FederatedData.from_clients(clients, classes=labels, min_examples=min_examples)
    network = Network(model, data.x[0], loss, functions)
    if loss is cross_entropy and data.y.is_floating_point():
        raise DataError("the targets are real numbers; give integer labels, or your own loss")
    _try(network, data)
    data = _with_outputs(network, data, classes)
    data.check(min_examples)
    return Task(name, network, data, defaults)


def outside(clients: list[ClientData], network: Network) -> FederatedData:
    """Build a dataset from examples no task has checked. Whole numbers must be labels only with the default loss."""
    labels = None if network.loss is cross_entropy else 0
    return with_classes(network, FederatedData.from_clients(clients, classes=labels, min_examples=1))


def examined(test: tuple[ModelInputs, Tensor], network: Network) -> FederatedData:
    """The same from test examples alone."""
    if len(test) != 2 or not all(isinstance(part, Tensor | Several | Mapping) for part in test):
        raise DataError("test examples are inputs and targets: a tuple of tensors (x, y)")
    x, y = as_inputs(test[0]), test[1]
    if len(x) != len(y):
        raise DataError(f"there are {len(x)} test inputs but {len(y)} test targets")
    return outside([(x, y, x, y)], network)


def task_elsewhere(name: str, network: Network, clients: int, test: tuple[ModelInputs, Tensor] | None = None) -> Task:
    """A task whose clients' examples are on their own devices. Those of `test`, if there are any, are nobody's."""
    none = Shards.of([np.zeros(0, np.int64)] * clients)
    if test is None:
        x, y = network.example.unsqueeze(0)[:0], torch.zeros(0, dtype=torch.int64)
        return Task(name, network, FederatedData(x, y, x, y, none, none, 0))
    known = examined(test, network)
    return Task(name, network, replace(known, train=none, test=Shards(torch.arange(len(known.test_y)), none.offsets)))


TAKEN = re.compile("^(loss|accuracy)$|_(late|worst|spread)$")
"""Names that a record has of its own."""


def check_metrics(metrics: Mapping[str, Metric | Whole] | None) -> dict[str, Metric | Whole]:
    """The user's own metrics, by names that a record can have."""
    if not isinstance(metrics, Mapping | None):
        raise SettingError("metrics must be functions by name, such as metrics={'mae': lambda outputs, targets: …}")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not re.fullmatch(r"\w+", name) or TAKEN.search(name):
            raise SettingError(
                "a metric needs a name of letters and digits, not loss, accuracy or one that ends in _late, _worst or "
                f"_spread; got {name!r}"
            )
        if not callable(metric) and not isinstance(metric, Whole):
            raise SettingError(f"metric {name!r} is not a function of outputs and targets")
    return dict(metrics or {})


def _try(network: Network, data: FederatedData) -> None:
    """Run the model once on two examples, as in training: it must be a function of parameters, inputs and key alone."""
    buffers = {name: buffer.clone() for name, buffer in network.module.named_buffers()}
    generator = torch.random.get_rng_state()
    shapes = {_try_loss(network, data, count) for count in (2, 3)}
    if not torch.equal(generator, torch.random.get_rng_state()):
        torch.random.set_rng_state(generator)
        raise ModelError("the model draws its own random numbers, which no key controls; only dropout may be random")
    if len(shapes) > 1:
        raise ModelError("the loss broadcasts across examples: outputs and targets differ in shape")
    for name, buffer in network.module.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise ModelError(
                f"the model changes its buffer {name!r} while it trains, and clients do not share such state"
            )


def _try_loss(network: Network, data: FederatedData, count: int) -> torch.Size:
    """Try the loss on this many examples; returns the shape of one example's loss."""
    rows = torch.zeros(count, dtype=torch.int64)
    x, y = data.x[rows], data.y[rows]
    shape = f"inputs of shape {tuple(x.shape[1:])} and {x.dtype}" if isinstance(x, Tensor) else f"inputs {x[0]}"
    what = f"{shape} with targets of shape {tuple(y.shape[1:])}"
    try:
        with torch.no_grad():
            outputs = network.predict(network.params(), x)
        _check_shapes(network, outputs, y)
        if y.dim() > 1 and network.loss is cross_entropy and with_classes(network, data).classes == 0:
            raise DataError(f"targets must be classes for which the model has logits, or {IGNORED} where none counts")
        losses = network.loss(outputs, y)
        network.training_loss(network.params(), x, y, None, keys.key(0))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, AssertionError) as error:
        raise ModelError(f"the model and its loss do not run on {what}: {_line(error)}") from error
    if not isinstance(losses, Tensor) or losses.shape[:1] != (count,):
        raise ModelError('the loss must give one number per example; torch\'s losses do with reduction="none"')
    for name, metric in network.metrics.items():
        _try_metric(name, metric, outputs, y)
    return losses.shape[1:]


def _check_shapes(network: Network, outputs: Any, y: Tensor) -> None:
    """The model must give one tensor; with the default loss, with logits for every label."""
    if not isinstance(outputs, Tensor):
        raise ModelError(
            f"the model gives {described(outputs)}, not a tensor: wrap it in a module whose forward returns the outputs"
        )
    if network.loss is not cross_entropy or class_dim(outputs, y) is not None:
        return
    if y.dim() > 1 and outputs.dim() == y.dim() + 1 and outputs.shape[1] == outputs.shape[-1] == y.shape[-1]:
        raise ModelError("sequences are as long as there are classes, so the outputs are ambiguous: give your own loss")
    raise DataError(
        f"targets have shape {tuple(y.shape[1:])} and outputs {tuple(outputs.shape[1:])}; give one label per example, "
        "or per position of a sequence, with at least two logits for each; or your own loss"
    )


def _try_metric(name: str, metric: Metric | Whole, outputs: Tensor, y: Tensor) -> None:
    try:
        if isinstance(metric, Whole):
            one = metric.join(metric.parts(outputs, y), torch.ones(len(y), dtype=torch.float64))
            if not isinstance(one, Tensor) or one.dim() > 0:
                raise ModelError(f"metric {name!r} must join its parts to one number, a tensor without dimensions")
            return
        values = metric(outputs, y)
        if not isinstance(values, Tensor) or values.shape[:1] not in ((), (len(y),)):
            raise ModelError(f"metric {name!r} must return a tensor: one number per example, or their mean")
        one_each(metric, outputs, y)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise ModelError(f"metric {name!r} cannot be computed with torch for each example: {_line(error)}") from error


def _line(error: Exception) -> str:
    """The first line of what torch says, which may be twenty lines long."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _with_outputs(network: Network, data: FederatedData, classes: int | None) -> FederatedData:
    """The data with as many classes as the model has outputs; with the default loss no label may exceed them."""
    found = with_classes(network, data)
    if network.loss is not cross_entropy:
        return found
    outputs = network.predict(network.params(), data.x[:1])
    dim = class_dim(outputs, data.y[:1])
    count = outputs.shape[1 if dim is None else dim]
    if classes is not None and classes > count:
        raise ModelError(f"the model's output for one example has shape {tuple(outputs.shape[1:])}, not ({classes},)")
    return replace(data, classes=classes if classes is not None else count)
