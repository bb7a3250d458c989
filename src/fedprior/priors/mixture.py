"""A mixture of K Gaussians: an ensemble.

    p(φ | w_1 … w_K) = 1/K Σ_k N(φ | w_k, 1/λ)

A client starts at the component that explains its data best and is pulled towards all components by their
responsibilities. The server moves each component to the responsibility-weighted mean and predicts with all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.keys import Purpose
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import weighted
from fedprior.priors.base import Assignment, Explain, Prior, dense_layout
from fedprior.priors.gaussian import squared_distance
from fedprior.wire import Layout


@dataclass(frozen=True)
class Mixture(Prior):
    """`components` is K and `precision` is λ. The server's weights are stacked [K, …]."""

    components: int = 3
    precision: float = 0.1
    spread: float = 0.1
    """How far apart the components start: 0 is one point, 1 is the distance of independent initialisations."""

    @property
    def looks_at_data(self) -> bool:  # type: ignore[override]
        return self.components > 1

    def check(self) -> None:
        if self.components < 1:
            raise SettingError(f"components must be at least 1, got {self.components}")
        if not self.precision > 0:
            raise SettingError(f"precision must be above 0, got {self.precision}")
        if not 0 <= self.spread <= 1:
            raise SettingError(f"spread must lie between 0 and 1, got {self.spread}")

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """1/λ log 1/K Σ_k exp(−λ/2 ‖φ − w_k‖²), whose gradient in w_k is r_k (φ − w_k)."""
        return (self._log_densities(assignment, server).logsumexp(0) - math.log(self.components)) / self.precision

    def temper(self) -> Mapping[str, float]:
        return {"density": self.precision}

    def responsibilities(self, assignment: Assignment, server: Tree) -> Tensor:
        """p(z = k | φ): how much component k answers for this client."""
        return self._log_densities(assignment, server).softmax(0)

    def _log_densities(self, assignment: Assignment, server: Tree) -> Tensor:
        distances = torch.func.vmap(squared_distance, (None, 0))(assignment.weights, server["weights"])
        return -0.5 * self.precision * distances

    def init(self, params: Params) -> Tree:
        """The model itself, and K − 1 copies mixed with a shuffle of each tensor's own entries.

        If components start far apart, every client belongs to one of them. The first to improve then attracts all
        clients, and the others never learn. So components start close enough to share responsibilities.
        """
        weights = {}
        root = keys.fold(keys.key(0, next(iter(params.values())).device), Purpose.COMPONENTS)
        for i, (name, value) in enumerate(params.items()):
            rows = [value]
            for k in range(1, self.components):
                key = keys.fold(keys.fold(root, k), i)
                shuffled = value.flatten()[keys.permutation(key, value.numel(), value.numel())].reshape(value.shape)
                rows.append((1 - self.spread) * value + self.spread * shuffled)
            weights[name] = torch.stack(rows)
        return {"weights": weights}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """w_k = Σ_s n_s r_sk φ_s / Σ_s n_s r_sk; a component without clients stays where it is."""
        shares = weighted(torch.func.vmap(self.responsibilities, (0, None))(assignments, server), weight)
        total = shares.sum(0)
        weights = {}
        for name, values in assignments.weights.items():
            mean = torch.einsum("sk,s...->k...", shares / total.clamp(min=1e-12), values)
            lonely = (total < 1e-6).reshape(-1, *[1] * (values.dim() - 1))
            weights[name] = torch.where(lonely, server["weights"][name], mean)
        return {**server, "weights": weights}

    def predict(self, server: Tree) -> Params:
        return server["weights"]

    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        if self.components == 1:
            return {"weights": {name: value[0] for name, value in packet["weights"].items()}}
        # One after another: a user's loss may not run under two vmaps; torch's mse_loss does not.
        members = [{name: value[k] for name, value in packet["weights"].items()} for k in range(self.components)]
        best = torch.stack([explain(member) for member in members]).argmin().reshape(1)
        return {"weights": {name: value.index_select(0, best)[0] for name, value in packet["weights"].items()}}

    def downlink(self, server: Tree) -> Layout:
        return dense_layout(server["weights"], models=1)

    def uplink(self, state: Tree) -> Layout:
        return dense_layout({name: value[0] for name, value in state["weights"].items()})
