"""A Gaussian over what adapters do: over the products B A, and not over their factors.

    log p(A, B | server) = −λ/2 ‖B A − B̄ Ā‖² + const,   for every adapter; other weights as in the Gaussian prior

The mean of the factors is not the factors of the mean: (B₁ + B₂)(A₁ + A₂) / 4 has products of one client's B with
another's A. Here the M-step is exact. Over all products of rank r, Σ_s n_s log p is largest at the best approximation
of rank r to the mean product, which is its truncated singular value decomposition (Eckart and Young 1936).

A product has many factors, and the next round starts at one pair. B̄ has the size of the product, so that Ā keeps that
of the clients' mean A and no component dies; of all such Ā, it is the one that is nearest to that mean. Where the mean
product has a smaller rank than r, the clients' mean A fills the rest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core.adapters import Adapter
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import mean, weighted
from fedprior.priors.base import Assignment
from fedprior.priors.gaussian import Gaussian, squared_distance

SMALL = 1e-4
"""How much the mean A counts beside the mean product, relative to their sizes, in what Ā spans."""


@dataclass(frozen=True)
class Products(Gaussian):
    """N(w, 1/λ) over the products of `adapters` and over every other parameter."""

    adapters: tuple[Adapter, ...] = ()
    captured = False

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """−½ (Σ ‖B A − B̄ Ā‖² + ‖φ − w‖² of the other parameters)."""
        own, known = assignment.weights, server["weights"]
        apart = [_distance(own[a.up], own[a.down], known[a.up], known[a.down]) for a in self.adapters]
        rest = {name: value for name, value in known.items() if name not in self._factors()}
        return -0.5 * (torch.stack(apart).sum() + (squared_distance(own, rest) if rest else 0.0))

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """The best approximation of rank r to Σ_s n_s B_s A_s / Σ_s n_s, and the mean of every other parameter."""
        sent, factors = assignments.weights, self._factors()
        solved: Params = {name: mean(value, weight) for name, value in sent.items() if name not in factors}
        for adapter in self.adapters:
            solved |= _best(adapter, sent, mean(sent[adapter.down], weight), weight)
        return {**server, "weights": {name: solved[name] for name in server["weights"]}}

    def exposes(self) -> str:
        return "the M-step is a mean of products, which is not clipped; leave out products"

    def _factors(self) -> set[str]:
        return {name for adapter in self.adapters for name in (adapter.down, adapter.up)}


def _distance(b: Tensor, a: Tensor, other_b: Tensor, other_a: Tensor) -> Tensor:
    """‖B A − B̄ Ā‖², without a matrix of the layer's size."""
    left, right = torch.cat([b, -other_b], 1), torch.cat([a, other_a], 0)
    return ((left.T @ left) * (right @ right.T)).sum()


def _best(adapter: Adapter, sent: Params, near: Tensor, weight: Tensor | None) -> Params:
    """The factors of an adapter, from stacked uploads; A is as near as it can be to the mean A."""
    b, a = weighted(sent[adapter.up], weight), sent[adapter.down]
    clients, rank = a.shape[:2]
    product = b.transpose(0, 1).flatten(1) @ a.flatten(0, 1) / clients
    edge = SMALL * product.norm().clamp(min=SMALL) / near.norm()
    right = torch.linalg.svd(torch.cat([product, edge * near]), full_matrices=False)[2][:rank]
    turn_left, _, turn_right = torch.linalg.svd(near @ right.T)
    size = near.norm() / rank**0.5
    down = size * turn_left @ turn_right @ right  # of all rotations, the one that is nearest to the mean A
    up = product @ down.T / size**2
    return {adapter.down: down, adapter.up: up}
