"""ResNet20 with GroupNorm or BatchNorm."""

from collections.abc import Callable
from functools import partial

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


class ResNet20(nn.Module):
    """Three stages of three blocks, with 16 to 64 channels: 278,324 parameters for 100 classes."""

    def __init__(self, channels: int = 3, classes: int = 100, groups: int = 2, norm: str = "group") -> None:
        super().__init__()
        if norm not in NORMS:
            raise SettingError(f"norm must be {' or '.join(NORMS)}, got {norm!r}")
        make = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = make(16)
        self.relu = nn.ReLU()
        stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        blocks = []
        for inputs, outputs, stride in stages:
            blocks += [
                Block(inputs, outputs, stride, make),
                Block(outputs, outputs, 1, make),
                Block(outputs, outputs, 1, make),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.norm(self.conv(x))))
        out: Tensor = self.fc(self.pool(x).flatten(1))
        return out
