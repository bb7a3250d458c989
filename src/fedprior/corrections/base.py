"""A correction adds to a client's gradient or upload, may travel in messages, and may keep a memory per client."""

from collections.abc import Callable

from torch import Tensor

from fedprior.core.trees import Gates, Params, Tree
from fedprior.wire import Layout

Support = Callable[[Gates], Params]
"""Maps a message's gates to the weights that are part of its network: `Prior.support`."""


class Correction:
    """No correction. Subclasses override every method."""

    differences: bool = False
    """Whether uploads are differences from the packet even if nothing is rounded."""

    def init(self, weights: Params) -> Tree:
        """What the server keeps in addition to the prior's state."""
        return {}

    def remember(self, weights: Params) -> Tree:
        """A client's memory before its first turn."""
        return {}

    def broadcast(self, server: Tree) -> Tree:
        """What the correction adds to a packet."""
        return {}

    def direction(self, packet: Tree, memory: Tree, support: Params) -> Params:
        """What the correction adds to the gradient of the weights at every local step."""
        return {}

    def conclude(self, start: Params, end: Params, packet: Tree, scale: Tensor) -> Tree:
        """What it adds to the upload after local training. `scale` is the number of local steps times their size."""
        return {}

    def prepare(self, upload: Tree, packet: Tree, memory: Tree, support: Params) -> Tree:
        """What the client means to send, if uploads are differences. `support` is what the prior would send."""
        return upload

    def keep(self, memory: Tree, sent: Tree, meant: Tree) -> Tree:
        """The client's memory for its next turn, from what it `meant` to send and what it actually `sent`: server and
        client must not drift apart."""
        return memory

    def absorb(self, server: Tree, uploads: Tree, fraction: float | Tensor, weight: Tensor | None = None) -> Tree:
        """Update the server from stacked uploads, weighted by `weight`, of this `fraction` of all clients."""
        return server

    def extend(self, layout: Layout, server: Tree, support: Support) -> Layout:
        """Add the correction to the layout of a message."""
        return layout

    def thin(self, layout: Layout) -> Layout:
        """Leave out of an upload's layout what the correction does not let through."""
        return layout
