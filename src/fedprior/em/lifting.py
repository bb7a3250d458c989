"""Functions of one client or run, lifted to many at once, and their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprior.core.trees import Params, Tree, leaves, tree_map
from fedprior.em.algorithm import Algorithm

Lift = Callable[[Callable[[Algorithm], Callable[..., Any]]], Callable[..., Any]]


def lifting(algorithm: Algorithm, vectorised: bool, settings: Params | None = None) -> Lift:
    """What makes a function that an algorithm has for one client, or run, one for all of them.

    That is `vmap`, or nothing where there is one: `lift(lambda own: own.prior.receive)(packets)`. `settings` are the
    scalars of the prior in which stacked runs differ, one row for each client or run.
    """

    def lift(chosen: Callable[[Algorithm], Callable[..., Any]]) -> Callable[..., Any]:
        if not vectorised:
            return chosen(algorithm)
        if not settings:
            return torch.func.vmap(chosen(algorithm))
        return partial(torch.func.vmap(lambda mine, *given: chosen(algorithm.at(mine))(*given)), settings)

    return lift


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
