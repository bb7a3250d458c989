"""Group lasso at the client: the paper's FedL1 baseline.

    loss(w_s) + λ Σ_g ‖w_sg‖₂

Before either side speaks, groups with a norm of at most λ are set to zero and not sent. The server takes the plain
difference from what it receives, so that an absent group is a vote for zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core.trees import Gates, Params, Tree
from fedprior.core.weighting import averaging
from fedprior.priors.base import Assignment, Term
from fedprior.priors.gated import LocalGates
from fedprior.priors.gaussian import squared_distance
from fedprior.units import Gating


@dataclass(frozen=True)
class GroupLasso(LocalGates):
    """A group-lasso penalty of strength λ, which is also the threshold."""

    gating: Gating
    strength: float = 2e-3
    scalars = ("strength",)

    def terms(self) -> Mapping[str, Term]:
        return {"drift": self.drift, "lasso": self.lasso}

    def drift(self, assignment: Assignment, server: Tree) -> Tensor:
        """−½ ‖φ − w‖²; absent groups count as zero."""
        return -0.5 * squared_distance(assignment.weights, server["weights"])

    def lasso(self, assignment: Assignment, server: Tree) -> Tensor:
        """−Σ_g ‖φ_g‖₂."""
        return -torch.stack([norm.sum() for norm in self.gating.norms(assignment.weights).values()]).sum()

    def temper(self) -> Mapping[str, float]:
        return {"lasso": self.strength}

    def _threshold(self, params: Params) -> tuple[Gates, Gates]:
        norms = self.gating.norms(params)
        return self.gating.floor({layer: (n > self.strength).to(n.dtype) for layer, n in norms.items()}, norms)

    def prune(self, server: Tree) -> Tree:
        """Threshold once: groups that lose columns by it are judged by their new norm in the next round."""
        gates, floored = self._threshold(server["weights"])
        return {**server, "weights": self.gating.prune(server["weights"], gates), "floored": floored, "open": gates}

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        return {"weights": server["weights"], "gates": server["open"]}

    additive = True

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """The mean; absent groups count as zero."""
        mean_of = averaging(weight)
        return {**server, "weights": {name: mean_of(value) for name, value in assignments.weights.items()}}

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        gates, floored = self._threshold(local["weights"])
        return {"weights": self.leave(local["weights"], gates, packet), "gates": gates, "floored": floored}

    def effective_parameters(self, server: Tree) -> int:
        return int(self.gating.effective_parameters(server["open"]))
