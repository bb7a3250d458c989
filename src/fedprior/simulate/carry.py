"""Messages of stacked runs, all in tensors: what comes out at the other end, and how many bytes it took."""

from torch import Tensor
from torch.func import vmap

from fedprior import trees, wire
from fedprior.em import Algorithm
from fedprior.trees import Tree


def packet(algorithm: Algorithm, layout: wire.Layout, spoken: Tree) -> tuple[Tree, Tensor]:
    """What a client hears of what the server says, and the length of the message."""
    coded = algorithm.pack(spoken, layout)
    # What is in no message, such as the settings of stacked runs, is there without being sent.
    return {**spoken, **wire.restore(coded, layout)}, wire.count_bytes(coded, layout)


def uploads(said: Tree, coded: Tree, spoken: Tree, layout: wire.Layout) -> tuple[Tree, Tensor]:
    """[runs, cohort, …]: what the servers hear, and the bytes a run. Everything is in two dimensions of clients but
    `coded`, which is in one; it is empty where nothing is rounded."""
    if not coded:
        return said, vmap(vmap(lambda message: wire.count_bytes(message, layout)))(said).sum(1)
    runs, cohort = next(trees.leaves(said))[1].shape[:2]
    rows = trees.tree_map(lambda leaf: leaf.unflatten(0, (runs, cohort)), coded)
    sizes = vmap(vmap(lambda message: wire.count_bytes(message, layout)))(rows).sum(1)
    heard = vmap(vmap(lambda message, packet: wire.restore(message, layout, packet)))(rows, spoken)
    return {**said, **heard}, sizes
