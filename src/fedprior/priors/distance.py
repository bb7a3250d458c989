"""The Laplace prior of a client as a whole: the geometric median.

    log p(φ | w) = −λ ‖φ − w‖ + const

Its pull does not grow with the distance, and it is that of a client, not of a weight: what a hostile client sends is
one direction, however far it goes. The closed-form M-step is the geometric median, the point with the least sum of
distances, by Weiszfeld's algorithm (1937): a mean in which a client counts by one over its distance, weighed anew. It
stays bounded in any cohort of which less than half is hostile (Pillutla, Kakade and Harchaoui 2022).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import median, relative
from fedprior.priors.base import Assignment, Prior
from fedprior.priors.gaussian import squared_distance

NEAR = 1e-6
"""Distances are √(d² + NEAR²): at the server's weights the density then has a gradient, which is zero."""


@dataclass(frozen=True)
class Distance(Prior):
    """exp(−λ ‖φ − w‖) over all parameters together; `precision` is λ."""

    precision: float = 0.0
    steps: int = 16
    """How often the M-step weighs its mean anew."""
    scalars = ("precision",)

    def check(self) -> None:
        super().check()
        if self.steps < 1:
            raise SettingError(f"steps must be at least 1, got {self.steps}")

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        return -_distance(assignment.weights, server["weights"])

    def temper(self) -> Mapping[str, float]:
        return {"density": self.precision}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """w ← Σ_s (n_s / d_s) φ_s / Σ_s n_s / d_s, from the coordinate-wise median, which no outlier moves."""
        sent = assignments.weights
        centre = {name: median(values, weight) for name, values in sent.items()}
        for _ in range(self.steps):
            trust = 1 / torch.func.vmap(_distance, (0, None))(sent, centre)
            trust = trust if weight is None else trust * relative(weight, trust)
            shares = trust / trust.sum()
            centre = {name: torch.tensordot(shares.to(values.dtype), values, 1) for name, values in sent.items()}
        return {**server, "weights": centre}


def _distance(a: Params, b: Params) -> Tensor:
    return (squared_distance(a, b) + NEAR**2).sqrt()
