"""How a run is judged: by held-out loss, by accuracy if targets are classes, and by the user's own metrics."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedprior.core.federated import FederatedData
from fedprior.core.inputs import ModelInputs
from fedprior.core.network import IGNORED, Metric, Network, class_dim, cross_entropy
from fedprior.core.trees import Gates, Params
from fedprior.core.workers import Workers


class Measures(NamedTuple):
    """What can be measured for a network on some data."""

    names: tuple[str, ...]
    """`loss`, then `accuracy` if targets are classes, then the network's own metrics."""
    class_dim: int | None
    """The dimension of outputs that holds one logit per class, or None if targets are not classes."""


def measures(network: Network, data: FederatedData | None) -> Measures:
    """Look at the outputs for one example. Without data, assume an accuracy: only the clients know."""
    if data is None:
        return Measures(("loss", "accuracy", *network.metrics), 1 if network.loss is cross_entropy else None)
    found: int | None = None
    if data.classes and len(data.y):
        device = next(network.module.parameters()).device
        with torch.no_grad():
            outputs = network.predict(network.params(), data.x[:1].to(device))
        found = class_dim(outputs, data.y[:1].to(device))
    return Measures(("loss", *(("accuracy",) if found is not None else ()), *network.metrics), found)


def with_classes(network: Network, data: FederatedData) -> FederatedData:
    """Set the number of classes to that of the outputs, or to 0 if the targets are not such classes."""
    with torch.no_grad():
        outputs = network.predict(network.params(), data.x[:1])
    dim = class_dim(outputs, data.y[:1])
    targets = torch.cat([data.y, data.test_y]).flatten() if dim is not None else data.y
    targets = targets[targets != IGNORED] if data.y.dim() > 1 else targets
    fits = dim is not None and (len(targets) == 0 or (targets.min() >= 0 and targets.max() < outputs.shape[dim]))
    return replace(data, classes=outputs.shape[dim] if fits and dim is not None else 0)


def each(network: Network, what: Measures, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute every measure of every example, shape [measures, examples]."""
    rows = {"loss": network.losses(outputs, y)}
    if what.class_dim is not None:
        rows["accuracy"] = _right(outputs, y, what.class_dim)
    rows |= {name: one_each(metric, outputs, y) for name, metric in network.metrics.items()}
    return torch.stack([rows[name].double() for name in what.names])


def _right(outputs: Tensor, y: Tensor, dim: int) -> Tensor:
    """Whether each example is right; for a sequence, the share of its positions that are right."""
    right = outputs.argmax(dim) == y
    if y.dim() == 1:
        return right
    return (right & (y != IGNORED)).flatten(1).sum(1).double() / (y != IGNORED).flatten(1).sum(1).clamp(min=1)


def one_each(metric: Metric, outputs: Tensor, y: Tensor) -> Tensor:
    """Evaluate a metric for every example. One that returns a mean is called with one example at a time."""
    values = metric(outputs, y)
    if values.dim() == 0:
        values = vmap(lambda output, target: metric(output[None], target[None]))(outputs, y)
    return values.flatten(1).double().mean(1) if values.dim() > 1 else values


def sums(network: Network, what: Measures, params: Params, x: ModelInputs, y: Tensor, batch: int = 512) -> Tensor:
    """Add up each measure over these examples, shape [measures].

    A model that stores no statistics uses those of all the examples together.
    """
    batch = max(len(y), 1) if network.uses_batch(params) else batch
    total = torch.zeros(len(what.names), dtype=torch.float64, device=y.device)
    with torch.no_grad():
        for start in range(0, len(y), batch):
            outputs = network.predict(params, x[start : start + batch])
            total += each(network, what, outputs, y[start : start + batch]).sum(1)
    return total


def ensemble(what: Measures, outputs: Tensor) -> Tensor:
    """Combine the outputs of stacked models: the logarithm of their mean probabilities, or simply their mean."""
    if len(outputs) == 1:
        return outputs[0]
    if what.class_dim is None:
        return outputs.mean(0)
    return outputs.log_softmax(what.class_dim + 1).logsumexp(0) - torch.log(torch.tensor(len(outputs)))


def global_scores(
    workers: Workers, what: Measures, models: Params, data: FederatedData | None, batch: int = 512
) -> dict[str, float]:
    """Every measure on the union of the clients' test sets, as `global_NAME`. Stacked models act as an ensemble."""
    rows = data.test.distinct if data is not None else torch.zeros(0)
    if data is None or len(rows) == 0:
        return {f"global_{name}": float("nan") for name in what.names}
    device = next(iter(models.values())).device
    members = [{name: value[k] for name, value in models.items()} for k in range(len(next(iter(models.values()))))]

    def score(network: Network, chosen: Tensor) -> Tensor:
        x, y = data.test_x[chosen].to(device), data.test_y[chosen].to(device)
        with torch.no_grad():
            outputs = ensemble(what, torch.stack([network.predict(member, x) for member in members]))
            return each(network, what, outputs, y).sum(1)

    found = torch.stack(workers.map(score, rows.split(batch))).sum(0) / len(rows)
    return {f"global_{name}": value for name, value in zip(what.names, found.tolist(), strict=True)}


def blank_scores(what: Measures, clients: int) -> dict[str, Tensor]:
    """The scores before any client has had a turn."""
    return {name: torch.full((clients,), torch.nan, dtype=torch.float64) for name in what.names}


def local_scores(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over the clients that have had a turn and have a test set, as `local_NAME`."""
    return {f"local_{name}": float(values.nanmean()) for name, values in scores.items()}


def layer_sparsity(models: Params) -> dict[str, float]:
    """The share of zeros in each layer's weights, as `sparsity/LAYER`; empty if there are none."""
    weights = {name: value for name, value in models.items() if value.dim() > 2}  # stacking adds one dimension
    gone = {
        f"sparsity/{name.removesuffix('.weight')}": float((value == 0).double().mean())
        for name, value in weights.items()
    }
    return gone if any(gone.values()) else {}


def disagreement(client_gates: Gates, server_gates: Gates) -> dict[str, float]:
    """Mean and maximum over gates and clients of the total variation |π − θ|; empty if there are no gates."""
    if not server_gates:
        return {}
    distance = torch.cat([(client_gates[layer] - theta).abs().reshape(-1) for layer, theta in server_gates.items()])
    return {"tv_mean": float(distance.mean()), "tv_max": float(distance.max())}
