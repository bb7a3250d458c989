"""Multinomial logistic regression, the convex problem of the SCAFFOLD experiment."""

from torch import Tensor, nn


class LogisticRegression(nn.Module):
    """One linear layer over the flattened input."""

    def __init__(self, features: int = 784, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1))
        return out
