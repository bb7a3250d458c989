"""What every contestant trains: the same model, the same clients, one local epoch of SGD, the mean of the clients."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.catalogue.models import LeNet5, ResNet20
from fedprior.catalogue.models.resnet import ResNet18
from fedprior.catalogue.models.transformer import Transformer

LR = 0.05


class PflCnn(nn.Module):
    """pfl-research's CNN for its CIFAR10 benchmark: two 3×3 convolutions, pool, dropout, 128 neurons, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU()
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64 * 14 * 14, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.pool(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return self.fc2(self.drop2(self.relu(self.fc1(x.flatten(1)))))


@dataclass(frozen=True)
class Task:
    """A model and random data of a data set's shape."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of an example: an image, or the length of a sequence of symbols, each with the next one as its target."""
    classes: int
    clients: int
    examples: int
    """Examples per client; the mean if sizes are uneven."""
    cohort: int
    batch: int
    uneven: bool = False

    def sizes(self) -> list[int]:
        """How many examples each client has."""
        if not self.uneven:
            return [self.examples] * self.clients
        drawn = np.random.RandomState(0).normal(self.examples, 0.4 * self.examples, self.clients)
        return np.clip(drawn.round(), 20, 2 * self.examples).astype(int).tolist()

    def data(self) -> tuple[Tensor, Tensor, list[int]]:
        """Inputs and labels, client after client, and where each client's rows begin."""
        starts = [0, *np.cumsum(self.sizes()).tolist()]
        draw = torch.Generator().manual_seed(0)
        if len(self.shape) == 1:
            text = torch.randint(self.classes, (starts[-1], self.shape[0] + 1), generator=draw)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous(), starts
        x = torch.empty(starts[-1], *self.shape).normal_(generator=draw)
        return x, torch.randint(self.classes, (starts[-1],), generator=draw), starts

    def module(self) -> nn.Module:
        """The model, with the same weights for all contestants."""
        torch.manual_seed(0)
        return self.model()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over examples or, of sequences, over all positions."""
    return F.cross_entropy(outputs.flatten(0, targets.dim() - 1), targets.flatten())


TASKS = {
    task.name: task
    for task in (
        Task("cifar10", lambda: LeNet5(3, 32, 10), (3, 32, 32), 10, 100, 500, 10, 64),
        Task("cifar100", lambda: ResNet20(3, 100), (3, 32, 32), 100, 500, 100, 10, 20),
        Task("cifar100-batch", lambda: ResNet20(3, 100, norm="batch"), (3, 32, 32), 100, 500, 100, 10, 20),
        # FEMNIST has 3,500 writers. Fewer are enough here, because only those in a round cost anything.
        Task("femnist", lambda: LeNet5(1, 28, 62), (1, 28, 28), 62, 1000, 200, 10, 20, uneven=True),
        Task("pfl-cifar10", PflCnn, (3, 32, 32), 10, 1000, 50, 50, 10),
        Task("transformer", lambda: Transformer(80), (64,), 80, 100, 64, 10, 8),
        Task("transformer-384", lambda: Transformer(80, width=384, heads=6, layers=6), (64,), 80, 100, 64, 10, 8),
        Task("resnet18", ResNet18, (3, 32, 32), 10, 10, 500, 10, 64),
        # A quick check that everything runs.
        Task("smoke", lambda: LeNet5(1, 28, 10), (1, 28, 28), 10, 20, 40, 4, 20),
    )
}
