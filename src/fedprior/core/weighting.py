"""What an upload counts for: means and medians in which client s has n_s examples.

Hard EM minimises Σ_s n_s [mean loss of client s at φ_s − log p(φ_s | server)], in which every example counts as much as
any other. A client's own E-step does not depend on n_s; the M-step maximises Σ_s n_s log p(φ*_s | server). A weight of
None says that all clients count alike: 1/S Σ_s, as in the paper.
"""

import inspect
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior.core.errors import SettingError

KINDS = ("examples", "equal")
"""Each client counts as many times as it has examples, or once."""


def relative(weight: Tensor, like: Tensor) -> Tensor:
    """n_s over their mean, to multiply numbers stacked by client with; exactly 1 where all clients count alike."""
    shaped = weight.reshape(-1, *[1] * (like.dim() - 1))
    return (shaped / shaped.mean()).to(like.dtype)


def weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    """Values stacked by client, each as often as it counts: their mean is the weighted one."""
    return values if weight is None else values * relative(weight, values)


def mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_s n_s x_s / Σ_s n_s; the plain mean to the last bit where all n_s are alike."""
    return weighted(values, weight).mean(0)


def median(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Coordinate by coordinate, the value with half of the weight on either side.

    Where the weight falls into two halves exactly, as with an even number of clients that count alike, the middle
    between the two values beside the cut.
    """
    if weight is None:
        ordered, count = values.sort(0).values, values.shape[0]
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    ordered, order = values.sort(0)
    # Whole numbers in float64: a half is met exactly, or not at all.
    below, half = weight.double()[order].cumsum(0), weight.double().sum() / 2
    lower, upper = (below < half).sum(0, keepdim=True), (below <= half).sum(0, keepdim=True)
    return ((ordered.gather(0, lower) + ordered.gather(0, upper)) / 2)[0]


def check_takes_weight(prior: object) -> None:
    """Refuse a prior of one's own that was written before uploads had weights."""
    for method in ("solve", "slope"):
        if "weight" not in inspect.signature(getattr(prior, method)).parameters:
            raise SettingError(
                f"clients count by their examples, but {method} of {type(prior).__name__} takes no weight: add it, as "
                "docs/new-prior.md shows, or set weighting=equal"
            )


class Share(NamedTuple):
    """What a cohort counts for in the M-step."""

    fraction: float
    """Its share of all clients, or of their examples."""
    weight: Tensor | None = None
    """How many examples each client of it has; None: all count alike."""


def share(weighting: str, examples: list[int], everyone: list[int] | np.ndarray, device: torch.device) -> Share:
    """That of clients with so many examples, where `everyone` has so many."""
    if weighting == "equal":
        return Share(len(examples) / len(everyone))
    weight = torch.tensor(examples, dtype=torch.float64, device=device) if len(set(examples)) > 1 else None
    return Share(sum(examples) / int(np.sum(everyone)), weight)
