"""What a run is judged by."""

import torch
from torch import Tensor

from fedprior.data import FederatedData
from fedprior.network import Network
from fedprior.trees import Gates, Params
from fedprior.workers import Workers


def accuracy_count(network: Network, params: Params, x: Tensor, y: Tensor, batch: int = 512) -> Tensor:
    """How many of these examples a model gets right; none where targets are not labels.

    A model without statistics of its own uses those of all the examples together.
    """
    batch = max(len(y), 1) if network.uses_batch(params) else batch
    total = torch.zeros((), dtype=torch.int64, device=y.device)
    if y.dim() != 1 or y.is_floating_point():
        return total
    with torch.no_grad():
        for start in range(0, len(y), batch):
            outputs = network.predict(params, x[start : start + batch])
            total += (outputs.argmax(-1) == y[start : start + batch]).sum()
    return total


def ensemble_accuracy(workers: Workers, models: Params, data: FederatedData, batch: int = 512) -> float:
    """Accuracy on the union of the clients' test sets; stacked models vote with their mean probabilities."""
    rows = data.test.distinct
    if len(rows) == 0 or not data.labelled:
        return float("nan")
    device = next(iter(models.values())).device
    members = [{name: value[k] for name, value in models.items()} for k in range(len(next(iter(models.values()))))]

    def correct(network: Network, chosen: Tensor) -> int:
        with torch.no_grad():
            x = data.test_x[chosen].to(device)
            votes = torch.stack([network.predict(member, x).softmax(-1) for member in members])
        return int((votes.mean(0).argmax(-1) == data.test_y[chosen].to(device)).sum())

    return sum(workers.map(correct, rows.split(batch))) / len(rows)


def local_accuracy(accuracy: Tensor) -> float:
    """Mean over the clients that have had a turn and have a test set."""
    return float(accuracy.nanmean())


def layer_sparsity(models: Params) -> dict[str, float]:
    """Which share of each layer's weights is zero, as `sparsity/LAYER`; nothing where none is."""
    weights = {name: value for name, value in models.items() if value.dim() > 2}  # stacked: one dimension more
    gone = {
        f"sparsity/{name.removesuffix('.weight')}": float((value == 0).double().mean())
        for name, value in weights.items()
    }
    return gone if any(gone.values()) else {}


def disagreement(client_gates: Gates, server_gates: Gates) -> dict[str, float]:
    """Mean and maximum over gates and clients of the total variation |π − θ|; nothing where there are no gates."""
    if not server_gates:
        return {}
    distance = torch.cat([(client_gates[layer] - theta).abs().reshape(-1) for layer, theta in server_gates.items()])
    return {"tv_mean": float(distance.mean()), "tv_max": float(distance.max())}
