"""Multiply a layer's outputs or inputs by factors, a row of them for each example.

Scaling a group of weights by one number per example cannot be written as scaling the weights: each example would need a
network of its own. A group that makes one channel is linear in its scale, so the channel is scaled instead.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn


class Factor(NamedTuple):
    """What a module's channels are multiplied by."""

    values: Tensor
    """One row per example, one column per channel."""
    axis: int
    """The dimension of the channels: 1, or −1 for the last."""
    on_inputs: bool = False

    def times(self, x: Tensor) -> Tensor:
        """The channels of x, scaled."""
        examples, channels = self.values.shape
        between = [1] * (x.dim() - 2)
        shape = (examples, *between, channels) if self.axis == -1 else (examples, channels, *between)
        return x * self.values.reshape(shape)


Factors = Mapping[str, Factor]
"""By the name of the module."""
NONE: Factors = {}
"""No factors; nobody changes it."""


@contextmanager
def multiplied(module: nn.Module, factors: Factors) -> Iterator[None]:
    """Within this context, calls of the named modules are scaled."""
    handles = [_hook(factor)(module.get_submodule(name)) for name, factor in factors.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(factor: Factor) -> Callable[[nn.Module], Any]:
    if factor.on_inputs:
        return lambda part: part.register_forward_pre_hook(partial(_before, factor))
    return lambda part: part.register_forward_hook(partial(_after, factor))


def _before(factor: Factor, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (factor.times(given[0]), *given[1:])


def _after(factor: Factor, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return factor.times(out)
