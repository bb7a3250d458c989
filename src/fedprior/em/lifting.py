"""Lift functions of one client or run to many at once, and differentiate them."""

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
    """Lift a function that an algorithm has for one client or run to all of them.

    This is `vmap`, or nothing if there is only one: `lift(lambda own: own.prior.receive)(packets)`. `settings` are the
    prior's scalars in which stacked runs differ, one row per client or run.
    """

    def lift(chosen: Callable[[Algorithm], Callable[..., Result]], /) -> Callable[..., Result]:
        if not vectorised:
            return chosen(algorithm)
        if not settings:
            return torch.func.vmap(chosen(algorithm))
        return partial(torch.func.vmap(lambda mine, *given: chosen(algorithm.at(mine))(*given)), settings)

    return lift
