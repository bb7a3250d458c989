"""The Gaussian prior: FedAvg, FedProx and the FedOpt family.

    log p(φ | w) = −λ/2 ‖φ − w‖² + const

With λ → 0 the E-step is plain local training and the closed-form M-step is the mean: FedAvg. With λ > 0 it is FedProx.
One optimiser step on the gradient Σ_s (φ_s − w), instead of the closed form, gives Reptile and FedOpt.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core.trees import Params, Tree, map_rows
from fedprior.core.weighting import averaging, weighted
from fedprior.priors.base import Assignment, Prior


@dataclass(frozen=True)
class Gaussian(Prior):
    """N(w, 1/λ) over every parameter; `precision` is λ."""

    precision: float = 0.0
    scalars = ("precision",)

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """−½ ‖φ − w‖²; λ is its temper in the E-step and part of the step size in the M-step."""
        return -0.5 * squared_distance(assignment.weights, server["weights"])

    def temper(self) -> Mapping[str, float]:
        return {"density": self.precision}

    def exposes(self) -> str:
        return ""

    known_slope, additive = True, True

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """∇w = w − φ_s on average, to the last bit as autograd has it, which keeps every intermediate value."""

        def one(sent: Tensor, known: Tensor) -> Tensor:
            halves = weighted(sent.new_full((len(sent),), 0.5 / len(sent)), weight)
            return -((sent - known) * 2 * halves.reshape(-1, *[1] * known.dim())).sum(0)

        return {"weights": {name: one(uploads["weights"][name], known) for name, known in server["weights"].items()}}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """w = Σ_s n_s φ_s / Σ_s n_s."""
        return {**server, "weights": map_rows(averaging(weight), 1, assignments.weights)}


def squared_distance(a: Params, b: Params, mask: Params | None = None) -> Tensor:
    """Σ m (a − b)²; parameters without a mask count in full."""
    mask = mask or {}
    terms = [((a[name] - b[name]).square() * mask.get(name, 1.0)).sum() for name in b]
    return torch.stack(terms).sum()
