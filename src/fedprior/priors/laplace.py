"""The Laplace prior: the robust median.

    log p(φ | w) = −λ Σ_j |φ_j − w_j| + const

Its pull is not smooth, so the client takes an exact proximal step after each gradient step. Many of its weights then
stay *equal* to the server's, and only those that differ are sent. The closed-form M-step is the coordinate-wise median,
which outliers do not move; the gradient M-step adds up signs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import median
from fedprior.priors.base import Assignment, Prior
from fedprior.wire import Layout, Section


@dataclass(frozen=True)
class Laplace(Prior):
    """Lap(w, 1/λ) over every parameter; `precision` is λ."""

    precision: float = 1e-3
    smooth = False
    scalars = ("precision",)

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """−Σ |φ − w|, whose gradient in w is Σ sign(φ − w)."""
        parts = [(assignment.weights[name] - w).abs().sum() for name, w in server["weights"].items()]
        return -sum(parts[1:], parts[0])

    def temper(self) -> Mapping[str, float]:
        """No terms: `prox` applies the client's pull."""
        return {}

    def exposes(self) -> str:
        return "which weights moved is sent, and the M-step is a median"

    def prox(self, local: Tree, packet: Tree, lr: Tensor) -> Tree:
        """w + soft(φ − w, lr·λ): the minimiser of λ|φ' − w| + (φ' − φ)²/(2 lr), exactly w when φ is near."""
        pulled = {}
        for name, w in packet["weights"].items():
            away = local["weights"][name] - w
            pulled[name] = w + away.sign() * (away.abs() - lr.to(w.dtype) * self.precision).clamp(min=0)
        return {"weights": pulled}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """The weighted median; for an even number of clients that count equally, the midpoint of the middle two."""
        medians = {name: median(values, weight) for name, values in assignments.weights.items()}
        return {**server, "weights": medians}

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        """Mark the weights that moved; the others need not be sent."""
        moved = {name: (local["weights"][name] != w).to(w.dtype) for name, w in packet["weights"].items()}
        return {"weights": {name: moved[name] * value for name, value in local["weights"].items()}, "gates": moved}

    def realise(self, upload: Tree, reference: Tree) -> Params:
        return {
            name: upload["gates"][name] * value + (1 - upload["gates"][name]) * reference["weights"][name]
            for name, value in upload["weights"].items()
        }

    def uplink(self, state: Tree) -> Layout:
        shapes = {name: tuple(value.shape) for name, value in state["weights"].items()}
        return Layout({"weights": Section(shapes, dict)}, shapes, next(iter(state["weights"].values())).dtype)
