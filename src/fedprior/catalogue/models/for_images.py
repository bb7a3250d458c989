"""Build a network by name for images of any shape."""

from collections.abc import Callable

from torch import nn

from fedprior.catalogue.models.lenet5 import LeNet5
from fedprior.catalogue.models.logistic import LogisticRegression
from fedprior.catalogue.models.resnet import ResNet18, ResNet20
from fedprior.core.errors import SettingError
from fedprior.core.options import nearest


def for_images(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build `lenet5`, `resnet20`, `resnet18` or `logistic` for images of shape [channels, height, width]."""
    channels, height, width = shape
    if name == "lenet5" and (height != width or height < 16):
        raise SettingError(
            f"lenet5 needs square images of at least 16×16 pixels, got {height}×{width}; scale them: --set side=32"
        )
    builders: dict[str, Callable[[], nn.Module]] = {
        "lenet5": lambda: LeNet5(channels, height, classes),
        "resnet20": lambda: ResNet20(channels, classes),
        "resnet18": lambda: ResNet18(channels, classes),
        "logistic": lambda: LogisticRegression(channels * height * width, classes),
    }
    if name not in builders:
        raise nearest(name, builders, "model")
    return builders[name]()
