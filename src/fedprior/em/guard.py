"""What is done to a cohort's uploads before the server learns from them: they are clipped and, in private, noised.

    Δ_s = c_s (φ_s − w),  c_s = min(1, C / ‖φ_s − w‖)         an upload as a whole is no farther from w than C
    φ'_s = w + (S Δ_s + n) / E,  n ~ N(0, z² C² I)            in private: S uploads came, and E were expected

The mean of φ'_s over the S uploads is w + (Σ_s Δ_s + n) / E. So one client changes the sum by C at most, the noise is z
times that large, and how many have come does not show. An M-step that learns from the mean alone learns from this one.
Where nothing is clipped, nothing is added and S is E, an upload stays as it is, bit for bit.

With a quantile γ, C follows it from round to round (Andrew, Thakkar, McMahan and Ramaswamy 2021):

    b = 1/2 + (Σ_s (1[‖φ_s − w‖ ≤ C] − 1/2) + m) / E,  m ~ N(0, σ²)         the share of uploads that are not clipped
    C ← C exp(−η (b − γ))

One client changes that sum by 1/2 at most. Where the noise of the sum of uploads is z_Δ times C with
z_Δ⁻² + (2σ)⁻² = z⁻², both sums together cost what one costs whose noise is z times as large as a client.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.trees import Params, Tree

SECTION = "clip"
"""Where the server's state has C, if it follows a quantile."""
SPEED = 0.2
"""η: C changes by a tenth in a round, if all uploads are on the same side of it and it follows their median."""
CROWD = 20
"""σ is E / 20, so that b is off by a twentieth."""
COUNTED = -1
"""The branch of a round's key for the noise of the count; the tensors of weights have 0, 1, …"""


@dataclass(frozen=True)
class Guard:
    """How uploads are clipped and noised."""

    clip: float
    """C, the largest distance from the server's weights; if it follows a quantile, that of the first round."""
    noise: float = 0.0
    """z, the noise's size as a multiple of C."""
    expected: float | None = None
    """E, how many clients a round has on average; None if it is not private."""
    quantile: float | None = None
    """γ, the share of the uploads that C is to leave as they are; None if C is fixed."""

    @property
    def of_count(self) -> float:
        """σ, the noise of how many uploads are not clipped."""
        return self.expected / CROWD if self.noise and self.expected is not None else 0.0

    @property
    def of_sum(self) -> float:
        """z_Δ, the noise of the sum of uploads as a multiple of C; infinite if the count leaves it nothing."""
        if self.quantile is None or not self.noise:
            return self.noise
        left: float = self.noise**-2 - (2 * self.of_count) ** -2
        return left**-0.5 if left > 0 else math.inf

    def init(self, like: Tensor) -> Tree:
        """The section of the server's state that holds C, if it changes."""
        return {} if self.quantile is None else {SECTION: {"norm": like.new_tensor(self.clip, dtype=torch.float64)}}

    def __call__(
        self, uploads: Tree, sent: Params, server: Tree, key: Tensor, *, nobody: bool = False
    ) -> tuple[Tree, Tree]:
        """The uploads of a cohort, and the server with the next round's C.

        `sent` marks the weights that uploads hold, where that is not all of them. If `nobody` was there, the only
        upload has not moved and is not counted.
        """
        known = server["weights"]
        clip = self.clip if self.quantile is None else server[SECTION]["norm"]
        away = {name: _left(value - known[name], sent.get(name)) for name, value in uploads["weights"].items()}
        distance = _distance(away)
        factor = torch.where(distance > clip, clip / distance, 1.0)
        factor = torch.where(distance.isfinite(), factor, 0.0)
        count = 1.0 if self.expected is None else len(factor) / self.expected
        as_it_is = (factor == 1) & (count == 1)
        weights = {
            name: torch.where(_shaped(as_it_is, value), value, known[name] + _times(away[name], factor * count))
            for name, value in uploads["weights"].items()
        }
        uploads = {**uploads, "weights": self._noised(weights, clip, key)}
        if self.quantile is None:
            return uploads, server
        counted = distance.isfinite() & (not nobody)
        share = self._share(distance <= clip, counted, keys.fold(key, COUNTED))
        return uploads, {**server, SECTION: {"norm": clip * torch.exp(-SPEED * (share - self.quantile))}}

    def _noised(self, weights: Params, clip: float | Tensor, key: Tensor) -> Params:
        if not self.noise or self.expected is None:
            return weights
        size = self.of_sum * clip / self.expected
        draws = {
            name: keys.normal(keys.fold(key, i), value.shape[1:]) for i, (name, value) in enumerate(weights.items())
        }
        return {name: value + (size * draws[name]).to(value.dtype) for name, value in weights.items()}

    def _share(self, within: Tensor, counted: Tensor, key: Tensor) -> Tensor:
        """b; if it is not private, the plain share of those that count."""
        beyond_half = torch.where(counted, within.double() - 0.5, 0.0).sum()
        if self.of_count:
            beyond_half = beyond_half + self.of_count * keys.normal(key, ())
        return 0.5 + beyond_half / (counted.sum().clamp(min=1) if self.expected is None else self.expected)


def _distance(away: Params) -> Tensor:
    """‖φ_s − w‖ for each upload."""
    squares = [part.flatten(1).double().square().sum(1) for part in away.values()]
    return torch.stack(squares).sum(0).sqrt()


def _left(away: Tensor, mask: Tensor | None) -> Tensor:
    return away if mask is None else torch.where(mask > 0, away, 0.0)


def _times(away: Tensor, factor: Tensor) -> Tensor:
    """Each row times its factor; zero where a row is not finite, because infinity times zero is not a number."""
    return torch.where(away.isfinite(), away, 0.0) * _shaped(factor, away).to(away.dtype)


def _shaped(factor: Tensor, like: Tensor) -> Tensor:
    return factor.reshape(-1, *[1] * (like.dim() - 1))
