"""Fit a network into a size: close the gates that are worth the least for what they cost, until the rest fits."""

import torch
from torch import Tensor

from fedprior.core.trees import Gates
from fedprior.units.gating import Gating


def fitted(gating: Gating, worth: Tensor, gates: Gates, goal: Tensor) -> tuple[Gates, Gates]:
    """Close open gates in the order of worth per parameter until no more than `goal` parameters are left.

    `worth` has all layers in one vector. Each unit is counted as if only it went. Two units that go together share some
    weights, so this closes too few rather than too many. Also return the layers where the floor acted.
    """
    costs, size = torch.func.grad_and_value(gating.effective_parameters)(gates)
    cost, is_open = gating.join(costs), gating.join(gates) > 0
    worth = worth / cost.clamp(min=1)
    # Exclude the floor's units: closed and reopened, they would count as gone.
    scores = gating.part(torch.where(is_open, worth, -1.0))
    kept, _ = gating.floor({layer: torch.zeros_like(gate) for layer, gate in gates.items()}, scores)
    worth = torch.where(is_open & (gating.join(kept) == 0), worth, torch.inf)
    order = worth.argsort(stable=True)  # ties are broken by position, on any device
    gone = torch.where(is_open, cost, 0.0)[order].double()
    closes = gone.cumsum(0) - gone < size - goal
    left = torch.zeros_like(cost).scatter(0, order, (~closes).to(cost.dtype)) * is_open
    return gating.floor(gating.part(torch.maximum(left, gating.join(kept) * is_open)), scores)
