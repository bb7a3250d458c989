"""A Gaussian over every weight that clients learn as a whole, its mean and its precision: FedGauss.

    q_s(φ) = N(m_s, 1 / (N p_s)),   p = h + δ: the loss's curvature, plus the precision of a fixed prior N(0, 1/(N δ))

E-step: variational inference for N examples like the client's own, per example

    E_q [loss(φ)] + KL(q ‖ N(0, 1/(N δ))) / N = E_q [loss(φ)] + δ/2 ‖m‖² + Σ_j (δ / p_j + log p_j) / (2N) + const

by natural gradients, one draw φ = m + ε / √(N p) per step. In m and ℓ = log p, Fisher's information is N p and ½:

    m ← m − α min(1, p₀ / p) (g + δ m)        ℓ ← ℓ − ρ clip(1 − δ / p − N g (φ − m))

This is IVON (Shen et al. 2024), with ĥ = g (φ − m) N p: to second order, p e^{ρ (ĥ + δ − p) / p} is its step on h + δ,
which stays positive too. As there, rates are scaled by the initial precision p₀: α is that of plain SGD. The clip
is ours: one draw may call a curvature ten times what it was believed to be, and no more. So is the min: where the loss
is flat, p falls to δ, and p₀ / δ times the rate of SGD diverges. Neither moves the point where the steps end.

M-step: q minimises Σ_s n_s KL(q ‖ q_s). It is the product of the clients' Gaussians, each to the power n_s / Σ n_s:

    p = Σ_s n_s p_s / Σ_s n_s,   m = Σ_s n_s p_s m_s / Σ_s n_s p_s

Nothing counts twice. A q_s is the fixed prior times N / n_s copies of the client's likelihood, and not times the
server's posterior, where it merely starts. With N examples in all, the product has the prior and every example once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import mean
from fedprior.priors.base import Assignment, Explain, Prior, Term
from fedprior.wire import Layout, Section

LEAST = 1e-12
"""The least precision per example: none that an honest client sends is so small."""
WIDEST = 0.05
"""The standard deviation of a weight beyond which draws may be mostly noise: weights of a layer are about so large."""
FARTHEST = 10.0
"""The largest natural gradient in log p. Its noise can be far larger, and exponentials of that explode."""


@dataclass(frozen=True)
class GaussianPosterior(Prior):
    """N(m, 1 / (N p)) over every parameter."""

    examples: float = 1e4
    """N, how many examples the posterior is of."""
    decay: float = 1e-4
    """δ, the precision of the fixed prior around zero, per example."""
    curvature: float = 1.0
    """h₀, the curvature of the loss at the start of a run."""
    scalars = ("examples", "decay")
    told = ("weights", "precision")

    def check(self) -> None:
        for name in ("examples", "decay", "curvature"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be above 0, got {getattr(self, name)}")

    # ------------------------------------------------------------------ the density
    def terms(self) -> Mapping[str, Term]:
        return {"product": self.product, "fixed": self.fixed}

    def temper(self) -> Mapping[str, float]:
        """A client heeds the fixed prior alone: the server's posterior already knows its data."""
        return {"fixed": 1.0}

    def product(self, assignment: Assignment, server: Tree) -> Tensor:
        """−½ Σ_j [(p_sj / p_j) (m_sj − m_j)² + (p_sj − p_j)²], whose slope is the natural gradient of −KL(q ‖ q_s)."""
        own, known = assignment, server["precision"]
        parts = []
        for name, centre in server["weights"].items():
            sure = positive(own.precision[name])
            share = sure / known[name].detach()
            parts.append((share * (own.weights[name] - centre).square() + (sure - known[name]).square()).sum())
        return -0.5 * torch.stack(parts).sum()

    def fixed(self, assignment: Assignment, server: Tree) -> Tensor:
        """−δ/2 ‖m‖² − Σ_j (δ / p_j + log p_j) / (2N)."""
        centre = torch.stack([value.square().sum() for value in assignment.weights.values()]).sum()
        spread = torch.stack([(self.decay / p + p.log()).sum() for p in assignment.precision.values()]).sum()
        return -0.5 * (self.decay * centre + spread / self.examples)

    # ------------------------------------------------------------------ the server
    @property
    def start(self) -> float:
        """p₀."""
        return self.curvature + self.decay

    def init(self, params: Params) -> Tree:
        precision = {name: torch.ones_like(value) * self.start for name, value in params.items()}
        return {"weights": params, "precision": precision}

    additive, known_slope = True, True

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        sums = torch.func.vmap(self.evidence, (0, None))(assignments, server)
        means = {section: {name: mean(v, weight) for name, v in values.items()} for section, values in sums.items()}
        return self.conclude(means, server, len(next(iter(assignments.weights.values()))))

    def evidence(self, assignment: Assignment, server: Tree) -> Tree:
        """p_s and p_s m_s: Gaussians multiply by adding them."""
        sure = {name: positive(value) for name, value in assignment.precision.items()}
        return {"weights": {name: sure[name] * m for name, m in assignment.weights.items()}, "precision": sure}

    def conclude(self, evidence: Tree, server: Tree, clients: int) -> Tree:
        sure = evidence["precision"]
        return {
            **server,
            "weights": {name: v / sure[name] for name, v in evidence["weights"].items()},
            "precision": sure,
        }

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """The natural gradients (p_s / p) (m − m_s) and p − p_s, on average: a step of one on p is its mean."""
        sure = {name: positive(value) for name, value in uploads["precision"].items()}
        known = server["precision"]
        centre = {
            name: mean(sure[name] / known[name] * (value - uploads["weights"][name]), weight)
            for name, value in server["weights"].items()
        }
        return {"weights": centre, "precision": {name: p - mean(sure[name], weight) for name, p in known.items()}}

    # ------------------------------------------------------------------ the client
    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        logs = {name: positive(value).log() for name, value in packet["precision"].items()}
        return {"weights": packet["weights"], "log-precision": logs}

    def expect(self, local: Tree, packet: Tree) -> Assignment:
        sure = {name: value.exp() for name, value in local["log-precision"].items()}
        return Assignment(local["weights"], precision=sure)

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        """m + ε / √(N p), differentiable in both."""
        noise = _noise(expected.weights, key)
        size = {name: (self.examples * value).rsqrt() for name, value in expected.precision.items()}
        return {name: value + size[name] * noise[name] for name, value in expected.weights.items()}

    curved = True

    def natural(self, grads: Tree, local: Tree, packet: Tree) -> Tree:
        logs = local["log-precision"]
        return {
            "weights": {
                name: value * (self.start * (-logs[name]).exp()).clamp(max=1)
                for name, value in grads["weights"].items()
            },
            "log-precision": {
                name: (value * 2 * self.examples).clamp(-FARTHEST, FARTHEST)
                for name, value in grads["log-precision"].items()
            },
        }

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        return {"weights": local["weights"], "precision": self.expect(local, packet).precision}

    def sample(self, local: Tree, packet: Tree, key: Tensor) -> Params:
        return self.relax(self.expect(local, packet), packet, key)

    # ------------------------------------------------------------------ what a user is told
    def cautions(self, rounds: int) -> list[str]:
        """Warn about draws so far from their mean that a network may learn nothing from them."""
        width = (self.examples * self.start) ** -0.5
        if width <= WIDEST:
            return []
        return [
            f"examples = {self.examples:g} makes every weight uncertain by {width:.2g} at the start, as much as it is "
            f"large, so clients may learn nothing; from {1 / (WIDEST**2 * self.start):.0f} on it is {WIDEST}"
        ]

    # ------------------------------------------------------------------ the wire
    def downlink(self, server: Tree) -> Layout:
        return _with_precision(super().downlink(server))

    def uplink(self, state: Tree) -> Layout:
        return _with_precision(super().uplink(state))


def positive(precision: Tensor) -> Tensor:
    """A precision that came from elsewhere, where a hostile client may have made it negative."""
    return precision.clamp(min=LEAST)


def _with_precision(layout: Layout) -> Layout:
    """The same with the precisions, whose sign and scale rounding to bfloat16 keeps; differences could lose both."""
    section = Section(layout.sections["weights"].shapes, relative=False, precision="bfloat16")
    return replace(layout, sections={**layout.sections, "precision": section})


def _noise(like: Params, key: Tensor) -> Params:
    """Standard normal numbers for every parameter."""
    sizes = [value.numel() for value in like.values()]
    joint = keys.noise(key, sum(sizes), next(iter(like.values())).dtype)
    pieces = joint.split(sizes)
    return {name: piece.reshape(value.shape) for (name, value), piece in zip(like.items(), pieces, strict=True)}
