"""How much an upload counts: means, trimmed means and medians in which client s has n_s examples.

Hard EM minimises Σ_s n_s [mean loss of client s at φ_s − log p(φ_s | server)], in which every example counts equally.
A client's own E-step does not depend on n_s; the M-step maximises Σ_s n_s log p(φ*_s | server). A weight of None means
that all clients count equally: 1/S Σ_s, as in the paper.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior.core.errors import SettingError

KINDS = ("examples", "equal")
"""Each client counts once per example, or just once."""


def relative(weight: Tensor, like: Tensor) -> Tensor:
    """n_s divided by its mean: factors for values stacked by client, exactly 1 if all clients count equally."""
    return _shaped(weight / weight.mean(), like)


def _shaped(factors: Tensor, like: Tensor) -> Tensor:
    """One factor for each row of `like`."""
    return factors.reshape(-1, *[1] * (like.dim() - 1)).to(like.dtype)


def weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    """Scale values stacked by client so that their plain mean is the weighted mean."""
    return scaling(weight)(values)


def mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_s n_s x_s / Σ_s n_s; if all n_s are equal, the plain mean to the last bit."""
    return weighted(values, weight).mean(0)


def scaling(weight: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`weighted` for many tensors: their factors are computed once, because on a GPU every operation is a launch."""
    factors = {} if weight is None else {torch.float64: weight / weight.mean()}

    def scaled(values: Tensor) -> Tensor:
        if not factors:
            return values
        if values.dtype not in factors:
            factors[values.dtype] = factors[torch.float64].to(values.dtype)
        return values * _shaped(factors[values.dtype], values)

    return scaled


def averaging(weight: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`mean` for many tensors."""
    scaled = scaling(weight)
    return lambda values: scaled(values).mean(0)


def median(values: Tensor, weight: Tensor | None = None) -> Tensor:
    """For each coordinate, the value with half of the weight on either side.

    If the weight splits into two exact halves, as with an even number of clients that count equally, it is the midpoint
    of the two values next to the cut.
    """
    if weight is None:
        ordered, count = values.sort(0).values, values.shape[0]
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    ordered, order = values.sort(0)
    # Weights are whole numbers in float64, so the comparison with a half is exact.
    below, half = weight.double()[order].cumsum(0), weight.double().sum() / 2
    lower, upper = (below < half).sum(0, keepdim=True), (below <= half).sum(0, keepdim=True)
    return ((ordered.gather(0, lower) + ordered.gather(0, upper)) / 2)[0]


def trimmed_mean(values: Tensor, weight: Tensor | None, share: float) -> Tensor:
    """For each coordinate, the mean of what is left when this share of the weight is cut off at each end.

    A value at the cut counts in part, as if every client with n examples were n clients.
    """
    ordered, order = values.sort(0)
    if weight is None:
        each = torch.ones(len(values), *[1] * (values.dim() - 1), dtype=torch.float64, device=values.device)
    else:
        each = relative(weight, weight.double())[order]
    above, total = each.cumsum(0), each.sum(0, keepdim=True)
    kept = (torch.minimum(above, (1 - share) * total) - torch.maximum(above - each, share * total)).clamp(min=0)
    return (ordered * (kept / kept.sum(0, keepdim=True)).to(values.dtype)).sum(0)


def without_weight(prior: object) -> list[str]:
    """The methods of a user's prior that do not take the uploads' weights."""
    return [name for name in ("solve", "slope") if "weight" not in inspect.signature(getattr(prior, name)).parameters]


def check_takes_weight(prior: object) -> None:
    """Refuse a user's prior whose methods do not take the uploads' weights."""
    for method in without_weight(prior):
        raise SettingError(
            f"clients count by their examples, but {method} of {type(prior).__name__} takes no weight: add it, as "
            "docs/new-prior.md shows, or set weighting=equal"
        )


class Share(NamedTuple):
    """How much a cohort counts in the M-step."""

    fraction: float | Tensor
    """Its share of all clients, or of their examples."""
    weight: Tensor | None = None
    """The number of examples of each of its clients; None if all count equally."""


def share(weighting: str, examples: list[int], everyone: list[int] | np.ndarray, device: torch.device) -> Share:
    """The share of a cohort whose clients have `examples`, when all clients have `everyone`."""
    if weighting == "equal":
        return Share(len(examples) / len(everyone))
    weight = torch.tensor(examples, dtype=torch.float64, device=device) if len(set(examples)) > 1 else None
    return Share(sum(examples) / int(np.sum(everyone)), weight)
