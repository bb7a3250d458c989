"""The M-step at the server."""

from functools import partial

import torch
from torch import Tensor

from fedprior.em.algorithm import Algorithm
from fedprior.em.lifting import as_is, gradient_of, lifting
from fedprior.optimisers import TreeOptimiser
from fedprior.trees import Tree, clone


def m_step(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree,
    optimiser: TreeOptimiser | None,
    fraction: float = 1.0,
    *,
    vectorised: bool = False,
) -> Tree:
    """Maximise Σ_s log p(φ*_s | server) in the server's variables: in closed form, or by one optimiser step.

    `fraction` is the share of all clients that the uploads are from. Vectorised, everything has a leading dimension of
    independent runs.
    """
    prior = algorithm.prior
    lift = lifting(vectorised)

    def realise(uploads: Tree, server: Tree) -> Tree:
        return {**uploads, "weights": torch.func.vmap(lambda upload: prior.realise(upload, server))(uploads)}

    settle = lift(algorithm.settle) if algorithm.average else as_is
    absorbed = lift(partial(algorithm.correction.absorb, fraction=fraction))(server, uploads)
    if optimiser is None:
        solved: Tree = settle(lift(prior.solve)(lift(realise)(uploads, server), absorbed))
        return solved
    server, variables = absorbed, {section: server[section] for section in optimiser.values}

    def objective(variables: Tree, server: Tree, assignments: Tree) -> tuple[Tensor, Tensor]:
        values = torch.func.vmap(lambda a: prior.log_prob(a, {**server, **variables}))(assignments)
        return -values.mean(), values

    if prior.known_slope:
        grads = lift(prior.slope)(uploads, server)
    else:
        grads = gradient_of(lift(objective))(variables, server, lift(realise)(uploads, server))[0]
    optimiser.load(variables)
    optimiser.step(grads)
    updated: Tree = settle({**server, **clone(optimiser.values)})
    return updated
