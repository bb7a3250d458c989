"""What is done to a cohort's uploads before the server learns from them: they are clipped and, in private, noised.

    Δ_s = c_s (φ_s − w),  c_s = min(1, C / ‖φ_s − w‖)         an upload as a whole is no farther from w than C
    φ'_s = w + (S Δ_s + n) / E,  n ~ N(0, z² C² I)            in private: S uploads came, and E were expected

The mean of φ'_s over the S uploads is w + (Σ_s Δ_s + n) / E. So one client changes the sum by C at most, the noise is z
times that large, and how many have come does not show. An M-step that learns from the mean alone learns from this one.
Where nothing is clipped, nothing is added and S is E, an upload stays as it is, bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.trees import Params, Tree


@dataclass(frozen=True)
class Guard:
    """How uploads are clipped and noised."""

    clip: float
    """C, the largest distance from the server's weights."""
    noise: float = 0.0
    """z, the noise's size as a multiple of C."""
    expected: float | None = None
    """E, how many clients a round has on average; None if it is not private."""

    def __call__(self, uploads: Tree, sent: Params, server: Tree, key: Tensor) -> Tree:
        """The uploads of a cohort. `sent` marks the weights that they hold, where that is not all of them."""
        known = server["weights"]
        away = {name: _left(value - known[name], sent.get(name)) for name, value in uploads["weights"].items()}
        factor = self._factor(away)
        count = 1.0 if self.expected is None else len(factor) / self.expected
        as_it_is = (factor == 1) & (count == 1)
        weights = {
            name: torch.where(_shaped(as_it_is, value), value, known[name] + _times(away[name], factor * count))
            for name, value in uploads["weights"].items()
        }
        return {**uploads, "weights": self._noised(weights, key)}

    def _factor(self, away: Params) -> Tensor:
        """c_s for each upload; zero for one that is not finite."""
        squares = [part.flatten(1).double().square().sum(1) for part in away.values()]
        distance = torch.stack(squares).sum(0).sqrt()
        factor = torch.where(distance > self.clip, self.clip / distance, 1.0)
        return torch.where(distance.isfinite(), factor, 0.0)

    def _noised(self, weights: Params, key: Tensor) -> Params:
        if not self.noise or self.expected is None:
            return weights
        size = self.noise * self.clip / self.expected
        draws = {
            name: keys.normal(keys.fold(key, i), value.shape[1:]) for i, (name, value) in enumerate(weights.items())
        }
        return {name: value + (size * draws[name]).to(value.dtype) for name, value in weights.items()}


def _left(away: Tensor, mask: Tensor | None) -> Tensor:
    return away if mask is None else torch.where(mask > 0, away, 0.0)


def _times(away: Tensor, factor: Tensor) -> Tensor:
    """Each row times its factor; zero where a row is not finite, because infinity times zero is not a number."""
    return torch.where(away.isfinite(), away, 0.0) * _shaped(factor, away).to(away.dtype)


def _shaped(factor: Tensor, like: Tensor) -> Tensor:
    return factor.reshape(-1, *[1] * (like.dim() - 1))
