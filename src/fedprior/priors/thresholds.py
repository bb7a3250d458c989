"""Gates by magnitude thresholds, and their relaxation: σ((‖w‖ − τ) / T), τ = softplus(v), and the hard concrete.

All gates are in one vector, whatever layers they belong to.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior.core import keys
from fedprior.core.operations import operation

# The hard-concrete distribution of Louizos, Welling and Kingma (2018): stretch (γ, ζ) and temperature β.
BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
SHIFT = math.log(-GAMMA / ZETA)
"""What makes P(z > 0) = π."""
SMALLEST = 1e-8
"""The smallest threshold."""
CLOSED = -1e9
"""The logit of a gate that the server has closed for good: of probability zero, and less likely than any other."""
NO_THRESHOLD, OPEN = -100.0, 100.0
"""v of a gate in the dense rounds, and its logit then: of probability one in any precision, however small its norm."""
EDGE = NO_THRESHOLD / 2
"""Below it there is no threshold: half way, because an optimiser with weight decay moves v a little."""


@operation
def logits_and_gates(
    norms: Tensor, v: Tensor, is_open: Tensor | None, temperature: Tensor | float, *, dense: bool
) -> tuple[Tensor, Tensor]:
    """Logits and probabilities; gates that are not open are closed for good. `dense`: some have no threshold yet."""
    logits = (norms - F.softplus(v)) / temperature
    if dense:
        logits = torch.where(without_threshold(v), OPEN, logits)
    logits = logits if is_open is None else torch.where(is_open, logits, CLOSED)
    return logits, logits.sigmoid()


def without_threshold(v: Tensor) -> Tensor:
    """Which gates have no threshold yet."""
    return v < EDGE


def thresholds_for(norms: Tensor, logits: Tensor | float, temperature: float) -> Tensor:
    """v such that the gates have these logits; where that needs τ < 0, the smallest τ there is."""
    tau = (norms - temperature * logits).clamp(min=SMALLEST)
    return inverse_softplus(tau)


def inverse_softplus(tau: Tensor) -> Tensor:
    """v with softplus(v) = τ."""
    return tau + (-(-tau).expm1()).log()


def hard_concrete(logit: Tensor, u: Tensor) -> Tensor:
    """A draw in [0, 1] from uniform u, with P(z > 0) = σ(logit); differentiable in the logit."""
    noise = u.logit() / BETA + SHIFT
    s = torch.add(noise, logit, alpha=1 / BETA).sigmoid()
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


@operation
def draw_gates(logits: Tensor, key: Tensor) -> Tensor:
    """One hard-concrete draw a gate from the key's uniform numbers; differentiable in the logits."""
    return hard_concrete(logits, keys.uniform(key, tuple(logits.shape), logits.dtype))
