"""The Student-t prior: the trimmed mean, and the mean that trusts near clients more.

    log p(φ | w) = −(ν + 1)/2 Σ_j log(1 + (φ_j − w_j)² / (ν s²)) + const

A Gaussian whose precision has a Gamma prior of its own, weight by weight. EM over that precision turns the M-step into
a mean that is weighed anew: a value at a distance of x scales is trusted (ν + 1) / (ν + x²). Its likelihood can have
several maxima, and a hostile value may have one of its own. So the M-step starts from the trimmed mean, and without any
step it stays there: then a value counts, or is too far out to count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Tree
from fedprior.core.weighting import trimmed_mean, weighted
from fedprior.priors.base import Assignment, Prior


@dataclass(frozen=True)
class StudentT(Prior):
    """t_ν(w, s) over every parameter."""

    freedom: float = 3.0
    scale: float = 0.003
    trim: float = 0.25
    """The share of a cohort that the start of the M-step leaves out at each end, weight by weight."""
    steps: int = 10
    """How often the M-step weighs its mean anew."""
    precision: float = 0.0
    scalars = ("precision",)

    def check(self) -> None:
        super().check()
        if not (self.freedom > 0 and self.scale > 0):
            raise SettingError(f"freedom and scale must be above 0, got {self.freedom} and {self.scale}")
        if not 0 <= self.trim < 0.5:
            raise SettingError(f"trim must be at least 0 and below 0.5, got {self.trim}")
        if self.steps < 0:
            raise SettingError(f"steps must be at least 0, got {self.steps}")

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        away = [(assignment.weights[name] - w) / self.scale for name, w in server["weights"].items()]
        terms = [(x.square() / self.freedom).log1p().sum() for x in away]
        return -(self.freedom + 1) / 2 * torch.stack(terms).sum()

    def temper(self) -> Mapping[str, float]:
        return {"density": self.precision}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """w ← Σ_s n_s t_s φ_s / Σ_s n_s t_s with t = (ν + 1) / (ν + x²), from the trimmed mean."""
        solved = {}
        for name, values in assignments.weights.items():
            centre = trimmed_mean(values, weight, self.trim)
            for _ in range(self.steps):
                away = (values - centre) / self.scale
                trust = weighted((self.freedom + 1) / (self.freedom + away.square()), weight)
                centre = (trust * values).sum(0) / trust.sum(0)
            solved[name] = centre
        return {**server, "weights": solved}
