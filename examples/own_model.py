"""Your own network and your own clients: train them with FedSparse, read the records, use the model.

    python examples/own_model.py

Each of twenty clients mostly sees two of four patterns. Together they train one small convolutional network, and the
spike-and-slab prior of FedSparse finds out how few of its units the task needs.
"""

import torch
from torch import Tensor, nn

import fedprior

CLASSES, CLIENTS = 4, 20


class TwoLayers(nn.Module):
    """Any `nn.Module` will do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * 3 * 3, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv(x)))
        return self.out(torch.relu(self.fc(x.flatten(1))))


def make_clients() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """One `(x, y, test_x, test_y)` per client: noisy 8×8 images with uneven labels. Use your own data here."""
    patterns = torch.randn(CLASSES, 1, 8, 8)
    clients = []
    for client in range(CLIENTS):
        favourites = torch.tensor([client % CLASSES, (client + 1) % CLASSES])
        size = 30 + 5 * client  # clients may differ in size
        y = torch.where(torch.rand(size) < 0.8, favourites[torch.randint(2, (size,))], torch.randint(CLASSES, (size,)))
        x = patterns[y] + torch.randn(size, 1, 8, 8)
        held_out = size // 4
        clients.append((x[held_out:], y[held_out:], x[:held_out], y[:held_out]))
    return clients


def main() -> None:
    """Train, then look at the result."""
    torch.manual_seed(0)
    task = fedprior.own_task(TwoLayers(), make_clients(), name="patterns", clients_per_round=5, batch_size=10)

    # `fedprior algorithms` lists all settings; `fedprior.run(task, "fedsparse")` uses the defaults.
    fedsparse = fedprior.algorithm("fedsparse", task.network, lambda0=1e-4, local_optimiser="SGD(lr=0.1)")
    result = fedprior.run(task, fedsparse, rounds=40, evaluate_every=10, seed=1)  # out="runs/patterns" keeps it

    print("round  global  local  sparsity  bytes up and down")
    for record in result.records:
        if "global_accuracy" in record:
            print(
                f"{record['round']:5}  {record['global_accuracy']:6.1%}  {record['local_accuracy']:5.1%}"
                f"  {record['sparsity']:8.1%}  {record['bytes_up']:,} {record['bytes_down']:,}"
            )
    summary = result.summary
    print(f"{summary['effective_parameters']:,} of {summary['parameters']:,} parameters are left")

    # The server's network is an ordinary module again. Its closed units are zero.
    x, y = task.data.test_x[:5], task.data.test_y[:5]
    print("predicted", result.model(x).argmax(1).tolist(), "true", y.tolist())


if __name__ == "__main__":
    main()
