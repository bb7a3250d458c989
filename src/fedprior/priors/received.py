"""A packet as a client holds it while it trains: with what follows from it and does not change from step to step."""

from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree

from fedprior.core.trees import Params, Tree


class Known(NamedTuple):
    """What a client computes from its packet once. All layers are in one vector."""

    logits: Tensor
    """Those of the server's gates, θ."""
    is_open: Tensor
    """Which gates the server has not closed."""
    price: Tensor
    """What an open gate adds to the log density: the terms that are linear in π."""
    constant: Tensor
    """What they subtract whatever π is."""
    silent: tuple[Tensor, ...] = ()
    """The norm that each group has lost; nothing if no group can lose any."""


class Received(dict[str, Params]):
    """The packet's sections and, beside them, what is `known` from them."""

    def __init__(self, packet: Tree, known: Known) -> None:
        super().__init__(packet)
        self.known = known


# `torch.func.vmap` takes apart and joins again only types that it has been told about.
_pytree.register_pytree_node(
    Received, lambda received: ([dict(received), received.known], None), lambda parts, _: Received(*parts)
)
