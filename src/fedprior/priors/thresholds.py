"""Gates by magnitude thresholds, σ((‖w‖ − τ) / T) with τ = softplus(v), and their hard-concrete relaxation.

All gates are in one vector, whatever their layers.
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
"""The shift of the location that makes P(z > 0) = π."""
ACTIVE = -BETA * SHIFT
"""Without that shift, how much larger the logit of P(z > 0) is."""
SMALLEST = 1e-8
"""The smallest threshold."""
CLOSED = -1e9
"""The logit of a gate that the server has closed for good: its probability is zero, less than that of any other."""
NO_THRESHOLD, OPEN = -100.0, 100.0
"""v and the logit of a gate in the dense rounds: its probability is one in any precision, however small its norm."""
EDGE = NO_THRESHOLD / 2
"""Below this v there is no threshold. It is half of it, because an optimiser with weight decay moves v a little."""


@operation
def logits_and_gates(
    norms: Tensor, v: Tensor, is_open: Tensor | None, temperature: Tensor | float, *, dense: bool
) -> tuple[Tensor, Tensor]:
    """Logits and probabilities. Gates that are not open are closed for good. With `dense`, some lack a threshold."""
    logits = (norms - F.softplus(v)) / temperature
    if dense:
        logits = torch.where(without_threshold(v), OPEN, logits)
    logits = logits if is_open is None else torch.where(is_open, logits, CLOSED)
    return logits, logits.sigmoid()


def without_threshold(v: Tensor) -> Tensor:
    """Which gates have no threshold yet."""
    return v < EDGE


def thresholds_for(norms: Tensor, logits: Tensor | float, temperature: float) -> Tensor:
    """v such that the gates have these logits; if that needs τ < 0, the smallest τ is used."""
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
    """One hard-concrete draw per gate, from the key's uniform numbers; differentiable in the logits."""
    return hard_concrete(logits, keys.uniform(key, tuple(logits.shape), logits.dtype))
