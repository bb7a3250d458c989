"""A correction adds to the gradient of a client's weights, rides in the messages, and may remember each client."""

from collections.abc import Callable

from torch import Tensor

from fedprior.core.trees import Gates, Params, Tree
from fedprior.wire import Layout

Support = Callable[[Gates], Params]
"""From a message's gates to the weights that are part of its network: `Prior.support`."""


class Correction:
    """No correction. Subclasses override all of it."""

    def init(self, weights: Params) -> Tree:
        """What the server keeps beside the prior's state."""
        return {}

    def remember(self, weights: Params) -> Tree:
        """A client's memory before its first turn."""
        return {}

    def broadcast(self, server: Tree) -> Tree:
        """What is added to a packet."""
        return {}

    def direction(self, packet: Tree, memory: Tree, support: Params) -> Params:
        """What is added to the gradient of the weights at every local step."""
        return {}

    def conclude(self, start: Params, end: Params, packet: Tree, scale: Tensor) -> Tree:
        """After local training: what is added to the upload. `scale` is the number of local steps times their size."""
        return {}

    def keep(self, memory: Tree, sent: Tree) -> Tree:
        """The client's memory for its next turn, from what it really sent: server and client must not drift apart."""
        return memory

    def absorb(self, server: Tree, uploads: Tree, fraction: float | Tensor, weight: Tensor | None = None) -> Tree:
        """The server's own update, from stacked uploads that count by `weight`, this fraction of all clients'."""
        return server

    def extend(self, layout: Layout, server: Tree, support: Support) -> Layout:
        """The layout of a message with the correction in it."""
        return layout
