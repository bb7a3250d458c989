"""The paper's networks, pinned by their parameter counts, and the check that a user's own can be trained."""

from fedprior.models.check import check_statistics, check_trainable
from fedprior.models.ensemble import Ensemble
from fedprior.models.for_images import for_images
from fedprior.models.initialise import INITIALISATIONS, initialise
from fedprior.models.lenet5 import LeNet5
from fedprior.models.logistic import LogisticRegression
from fedprior.models.resnet20 import ResNet20

__all__ = [
    "INITIALISATIONS",
    "Ensemble",
    "LeNet5",
    "LogisticRegression",
    "ResNet20",
    "check_statistics",
    "check_trainable",
    "for_images",
    "initialise",
]
