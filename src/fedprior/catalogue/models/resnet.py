"""Residual networks for small images, with GroupNorm or BatchNorm."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from fedprior.core.errors import SettingError

NORMS = ("group", "batch")


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        result: Tensor = self.relu(out + self.shortcut(x))
        return result


class ResNet(nn.Module):
    """A 3×3 convolution, stages of blocks that begin by halving the image except the first, the mean of all places."""

    def __init__(self, channels: int, classes: int, widths: Sequence[int], depth: int, norm: str, groups: int) -> None:
        super().__init__()
        if norm not in NORMS:
            raise SettingError(f"norm must be {' or '.join(NORMS)}, got {norm!r}")
        make = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = make(widths[0])
        self.relu = nn.ReLU()
        blocks: list[nn.Module] = []
        for inputs, outputs in pairwise([widths[0], *widths]):
            blocks.append(Block(inputs, outputs, 1 if not blocks else 2, make))
            blocks += [Block(outputs, outputs, 1, make) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.norm(self.conv(x))))
        out: Tensor = self.fc(self.pool(x).flatten(1))
        return out


class ResNet20(ResNet):
    """Three stages of three blocks, with 16 to 64 channels: 278,324 parameters for 100 classes."""

    def __init__(self, channels: int = 3, classes: int = 100, groups: int = 2, norm: str = "group") -> None:
        super().__init__(channels, classes, (16, 32, 64), 3, norm, groups)


class ResNet18(ResNet):
    """Four stages of two blocks, with 64 to 512 channels: 11,173,962 parameters for 10 classes."""

    def __init__(self, channels: int = 3, classes: int = 10, groups: int = 2, norm: str = "batch") -> None:
        super().__init__(channels, classes, (64, 128, 256, 512), 2, norm, groups)
