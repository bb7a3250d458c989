"""What a run is judged by."""

import torch
from torch import Tensor

from fedprior.data import FederatedData
from fedprior.network import Network
from fedprior.trees import Gates, Params


def ensemble_accuracy(network: Network, models: Params, data: FederatedData, batch: int = 1024) -> float:
    """Accuracy on the union of the clients' test sets; stacked models vote with their mean probabilities."""
    rows = data.test.rows.unique()
    if len(rows) == 0:
        return float("nan")
    count = len(next(iter(models.values())))
    correct = 0
    with torch.no_grad():
        for chosen in rows.split(batch):
            votes = [network.predict({k: v[i] for k, v in models.items()}, data.test_x[chosen]) for i in range(count)]
            outputs = votes[0] if count == 1 else torch.stack([vote.softmax(-1) for vote in votes]).mean(0)
            correct += int((outputs.argmax(-1) == data.test_y[chosen]).sum())
    return correct / len(rows)


def local_accuracy(accuracy: Tensor) -> float:
    """Mean over the clients that have had a turn and have a test set."""
    return float(accuracy.nanmean())


def disagreement(client_gates: Gates, server_gates: Gates) -> dict[str, float]:
    """Mean and maximum over gates and clients of the total variation |π − θ|; nothing where there are no gates."""
    if not server_gates:
        return {}
    distance = torch.cat([(client_gates[layer] - theta).abs().reshape(-1) for layer, theta in server_gates.items()])
    return {"tv_mean": float(distance.mean()), "tv_max": float(distance.max())}
