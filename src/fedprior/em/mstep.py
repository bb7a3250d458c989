"""The M-step at the server."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.trees import Params, Tree, clone
from fedprior.core.weighting import mean
from fedprior.em.algorithm import Algorithm
from fedprior.em.estep import gradient_of
from fedprior.em.lifting import Lift, lifting
from fedprior.priors import Assignment


def m_step(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree,
    optimiser: TreeOptimiser | None,
    fraction: float | Tensor = 1.0,
    weight: Tensor | None = None,
    *,
    rate: float | Tensor = 1.0,
    vectorised: bool = False,
    settings: Params | None = None,
) -> Tree:
    """Maximise Σ_s n_s log p(φ*_s | server) in the server's variables: in closed form, or by one optimiser step.

    `weight` is n_s, the number of examples behind each upload; None if all count equally. `fraction` is the uploads'
    share of all clients, or of their examples. `rate` multiplies the optimisers' learning rates. If vectorised,
    everything has a leading dimension of independent runs.
    """
    lift = lifting(algorithm, vectorised, settings)
    counted = () if weight is None else (weight,)
    absorbed = _absorb(algorithm, server, uploads, fraction, weight, lift)
    absorbed = lift(lambda own: own.absorb)(absorbed, uploads)
    if optimiser is None:
        assignments = lift(_realise)(uploads, server)
        solved = lift(_solve)(assignments, absorbed, *counted)
        return lift(lambda own: partial(settle, own, solved=True))(absorbed, solved)
    variables = {section: absorbed[section] for section in optimiser.values}
    grads = ascent(algorithm, variables, absorbed, uploads, *counted, lift=lift)
    return descend(algorithm, absorbed, grads, optimiser, rate, lift=lift)


def ascent(
    algorithm: Algorithm, variables: Tree, server: Tree, uploads: Tree, *weight: Tensor, lift: Lift | None = None
) -> Tree:
    """The gradient of −Σ_s n_s log p(φ_s | server) / Σ_s n_s in the server's variables."""
    lift = lift or lifting(algorithm, False)
    if algorithm.prior.known_slope:
        return lift(lambda own: own.prior.slope)(uploads, server, *weight)
    return gradient_of(lift(_objective))(variables, server, lift(_realise)(uploads, server), *weight)[0]


def descend(
    algorithm: Algorithm,
    server: Tree,
    grads: Tree,
    optimiser: TreeOptimiser,
    rate: float | Tensor,
    lift: Lift | None = None,
) -> Tree:
    """One step of the server's optimisers along these gradients."""
    lift = lift or lifting(algorithm, False)
    optimiser.load({section: server[section] for section in optimiser.values})
    optimiser.scale(rate)
    optimiser.step(grads)
    updated = lift(lambda own: own.prior.adjust)(server, {**server, **clone(optimiser.values)})
    return lift(lambda own: partial(settle, own, solved=False))(server, updated)


def _realise(algorithm: Algorithm) -> Callable[[Tree, Tree], Assignment]:
    """Maps stacked uploads to the assignments that they stand for."""

    def realise(uploads: Tree, server: Tree) -> Assignment:
        weights = torch.func.vmap(lambda upload: algorithm.prior.realise(upload, server))(uploads)
        return Assignment.of(weights, uploads)

    return realise


def _solve(algorithm: Algorithm) -> Callable[..., Tree]:
    """The prior's closed form, which must know every weight that the server had."""

    def solve(assignments: Assignment, server: Tree, *weight: Tensor) -> Tree:
        solved, name = algorithm.prior.solve(assignments, server, *weight), type(algorithm.prior).__name__
        if not isinstance(solved, Mapping) or not solved.keys() >= server.keys():
            raise SettingError(f"{name}.solve must return the server's whole state: {{**server, 'weights': …}}")
        before, after = (
            {key: tuple(v.shape) for key, v in state.get("weights", {}).items()} for state in (server, solved)
        )
        if wrong := [key for key in {**before, **after} if before.get(key) != after.get(key)]:
            raise SettingError(
                f"{name}.solve must return every weight of the server in its shape, and no others; it does not for "
                f"{', '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}"
            )
        return solved

    return solve


def _objective(algorithm: Algorithm) -> Callable[..., tuple[Tensor, Tensor]]:
    """−Σ_s n_s log p(φ*_s | server) / Σ_s n_s, in the server's variables."""

    def objective(variables: Tree, server: Tree, assignments: Assignment, *weight: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.func.vmap(lambda a: algorithm.prior.log_prob(a, {**server, **variables}))(assignments)
        return -mean(values, *weight), values

    return objective


def settle(algorithm: Algorithm, before: Tree, after: Tree, solved: bool) -> Tree:
    """Update the server's counts and averages after an M-step."""
    server = algorithm.prior.closures(before, after, solved)
    return algorithm.settle(server) if algorithm.average else server


def _absorb(
    algorithm: Algorithm, server: Tree, uploads: Tree, fraction: float | Tensor, weight: Tensor | None, lift: Lift
) -> Tree:
    """The correction's part of the M-step. If all count equally, `fraction` is one number for all runs."""
    absorb = algorithm.correction.absorb
    if weight is None:
        return lift(lambda _: partial(absorb, fraction=fraction))(server, uploads)
    return lift(lambda _: absorb)(server, uploads, fraction, weight)
