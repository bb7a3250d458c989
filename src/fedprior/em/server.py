"""The M-step at the server."""

from functools import partial

import torch
from torch import Tensor

from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.trees import Tree, clone
from fedprior.core.weighting import mean
from fedprior.em.algorithm import Algorithm
from fedprior.em.lifting import as_is, gradient_of, lifting


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
) -> Tree:
    """Maximise Σ_s n_s log p(φ*_s | server) in the server's variables: in closed form, or by one optimiser step.

    `weight` is n_s, how many examples each upload stands for; None: all count alike. `fraction` is the share of all
    clients, or of their examples, that the uploads are from. `rate` multiplies the optimisers' learning rates.
    Vectorised, everything has a leading dimension of independent runs.
    """
    prior = algorithm.prior
    lift = lifting(vectorised)
    counted = () if weight is None else (weight,)

    def realise(uploads: Tree, server: Tree) -> Tree:
        return {**uploads, "weights": torch.func.vmap(lambda upload: prior.realise(upload, server))(uploads)}

    settle = lift(algorithm.settle) if algorithm.average else as_is
    absorbed = _absorb(algorithm, server, uploads, fraction, weight, vectorised)
    absorbed = lift(algorithm.absorb)(absorbed, uploads)
    if optimiser is None:
        solved: Tree = lift(prior.solve)(lift(realise)(uploads, server), absorbed, *counted)
        final: Tree = settle(lift(partial(prior.closures, solved=True))(absorbed, solved))
        return final
    server, variables = absorbed, {section: server[section] for section in optimiser.values}

    def objective(variables: Tree, server: Tree, assignments: Tree, *weight: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.func.vmap(lambda a: prior.log_prob(a, {**server, **variables}))(assignments)
        return -mean(values, *weight), values

    if prior.known_slope:
        grads = lift(prior.slope)(uploads, server, *counted)
    else:
        grads = gradient_of(lift(objective))(variables, server, lift(realise)(uploads, server), *counted)[0]
    optimiser.load(variables)
    optimiser.scale(rate)
    optimiser.step(grads)
    updated: Tree = lift(prior.adjust)(server, {**server, **clone(optimiser.values)})
    final = settle(lift(partial(prior.closures, solved=False))(server, updated))
    return final


def _absorb(
    algorithm: Algorithm, server: Tree, uploads: Tree, fraction: float | Tensor, weight: Tensor | None, vectorised: bool
) -> Tree:
    """The correction's part of the M-step. Where all count alike `fraction` is one number for all runs."""
    absorb = algorithm.correction.absorb
    if weight is None:
        absorbed: Tree = lifting(vectorised)(lambda server, uploads: absorb(server, uploads, fraction))(server, uploads)
    else:
        absorbed = lifting(vectorised)(absorb)(server, uploads, fraction, weight)
    return absorbed
