"""Functions of one client or run, lifted to many at once, and their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedprior.core.trees import Tree, leaves, tree_map


def lifting(vectorised: bool) -> Callable[[Any], Any]:
    """What makes a function of one client, or run, one of all of them: `vmap`, or nothing where there is one."""
    return torch.func.vmap if vectorised else as_is


def as_is(anything: Any) -> Any:
    """What there is, unchanged."""
    return anything


def gradient_of(objective: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tree, Any]]:
    """∂objective/∂(first argument) and what the objective returns beside it, by plain autograd.

    Lifted to a cohort, the objective has one value a client; no client's value depends on another's variables, so the
    gradient of their sum is each client's own. torch.func.grad would record the backward pass as well, which nobody
    has a use for.
    """

    def gradient(variables: Tree, *rest: Any) -> tuple[Tree, Any]:
        with torch.enable_grad():
            inputs = tree_map(lambda leaf: leaf.detach().requires_grad_(), variables)
            value, beside = objective(inputs, *rest)
            flat = [leaf for _, leaf in leaves(inputs)]
            ones = torch.ones_like(value)
            found = torch.autograd.grad(value, flat, ones, allow_unused=True, materialize_grads=True)
        grads = iter(found)
        return tree_map(lambda _: next(grads), inputs), tree_map(Tensor.detach, beside)

    return gradient
