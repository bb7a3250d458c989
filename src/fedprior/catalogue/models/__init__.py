"""The paper's networks, as determined by their parameter counts, and ResNet18."""

from fedprior.catalogue.models.for_images import for_images
from fedprior.catalogue.models.initialise import INITIALISATIONS, initialise
from fedprior.catalogue.models.lenet5 import LeNet5
from fedprior.catalogue.models.logistic import LogisticRegression
from fedprior.catalogue.models.resnet import ResNet18, ResNet20

__all__ = [
    "INITIALISATIONS",
    "LeNet5",
    "LogisticRegression",
    "ResNet18",
    "ResNet20",
    "for_images",
    "initialise",
]
