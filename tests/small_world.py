"""A network and clients small enough to train in milliseconds, and large enough to be pruned."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

CLASSES = 4


class SmallNet(nn.Module):
    """Convolution, pool, two linear layers on 8×8 images; optionally with dropout of both kinds."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.pool = nn.MaxPool2d(2)
        self.drop2d = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(4 * 9, 12)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop2d(self.pool(torch.relu(self.conv(x))))
        return self.fc2(self.drop(torch.relu(self.fc1(x.flatten(1)))))


class PlainNet(nn.Module):
    """A convolution, a hidden layer, an output of three classes, on 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(36, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.max_pool2d(self.conv(x), 2)).flatten(1)
        return self.out(torch.relu(self.hidden(x)))


def small_net(seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> SmallNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallNet(dropout).to(dtype)


def small_clients(
    sizes: Sequence[int], test_sizes: Sequence[int] | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Noisy images of one pattern per class: something that can be learnt."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=draw)

    def images(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(CLASSES, (count,), generator=draw)
        return (patterns[y] + 0.7 * torch.randn(count, 1, 8, 8, generator=draw)).to(dtype), y

    tests = test_sizes if test_sizes is not None else [4 + i % 3 for i in range(len(sizes))]
    return [(*images(size), *images(test)) for size, test in zip(sizes, tests, strict=True)]
