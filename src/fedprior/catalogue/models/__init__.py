"""The paper's networks, as determined by their parameter counts, ResNet18, and two networks for text."""

from fedprior.catalogue.models.for_images import for_images
from fedprior.catalogue.models.initialise import INITIALISATIONS, initialise
from fedprior.catalogue.models.lenet5 import LeNet5
from fedprior.catalogue.models.logistic import LogisticRegression
from fedprior.catalogue.models.recurrent import CharRNN
from fedprior.catalogue.models.resnet import ResNet18, ResNet20
from fedprior.catalogue.models.transformer import Transformer

__all__ = [
    "INITIALISATIONS",
    "CharRNN",
    "LeNet5",
    "LogisticRegression",
    "ResNet18",
    "ResNet20",
    "Transformer",
    "for_images",
    "initialise",
]
