"""Functions of one client or run, lifted to many at once, and their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch

from fedprior.core.trees import Params
from fedprior.em.algorithm import Algorithm

Result = TypeVar("Result")


class Lift(Protocol):
    """From a function that an algorithm has for one client, or run, to one for all of them."""

    def __call__(self, chosen: Callable[[Algorithm], Callable[..., Result]], /) -> Callable[..., Result]: ...


def lifting(algorithm: Algorithm, vectorised: bool, settings: Params | None = None) -> Lift:
    """What makes a function that an algorithm has for one client, or run, one for all of them.

    That is `vmap`, or nothing where there is one: `lift(lambda own: own.prior.receive)(packets)`. `settings` are the
    scalars of the prior in which stacked runs differ, one row for each client or run.
    """

    def lift(chosen: Callable[[Algorithm], Callable[..., Result]], /) -> Callable[..., Result]:
        if not vectorised:
            return chosen(algorithm)
        if not settings:
            return torch.func.vmap(chosen(algorithm))
        return partial(torch.func.vmap(lambda mine, *given: chosen(algorithm.at(mine))(*given)), settings)

    return lift
