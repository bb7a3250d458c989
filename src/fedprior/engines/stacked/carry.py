"""Messages of stacked runs, all in tensors: what comes out at the other end, and how many bytes it took."""

from torch import Tensor
from torch.func import vmap

from fedprior import wire
from fedprior.core import trees
from fedprior.core.trees import Tree
from fedprior.em import Algorithm


def packet(algorithm: Algorithm, layout: wire.Layout, spoken: Tree) -> tuple[Tree, Tensor]:
    """What a client hears of what the server says, and the length of the message."""
    coded = algorithm.pack(spoken, layout)
    return wire.restore(coded, layout), wire.count_bytes(coded, layout)


def uploads(algorithm: Algorithm, said: Tree, coded: Tree, spoken: Tree) -> tuple[Tree, Tensor]:
    """[runs, cohort, …]: what the servers hear, and the bytes a run. Everything is in two dimensions of clients but
    `coded`, which is in one; it is empty where nothing is rounded."""

    def size(message: Tree, packet: Tree) -> Tensor:
        return wire.count_bytes(message, algorithm.uplink(packet))

    def hear(message: Tree, packet: Tree) -> Tree:
        return wire.restore(message, algorithm.uplink(packet), packet)

    if not coded:
        return said, vmap(vmap(size))(said, spoken).sum(1)
    runs, cohort = next(trees.leaves(said))[1].shape[:2]
    rows = trees.tree_map(lambda leaf: leaf.unflatten(0, (runs, cohort)), coded)
    return {**said, **vmap(vmap(hear))(rows, spoken)}, vmap(vmap(size))(rows, spoken).sum(1)
