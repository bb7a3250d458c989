"""Moves of channels (reshape, split, …) in a network that has lost some: the sizes in them become smaller."""

from typing import Any

import torch
from torch import Tensor, fx

from fedprior.core.errors import ModelError
from fedprior.units.edges import Edge, labels_of
from fedprior.units.torch_operations import name_of
from fedprior.units.trace import Edges

SHAPED = ("view", "reshape", "expand")
SPLITS = ("split", "chunk")


def channels_left(found: Edges, edge: Edge, left: dict[str, Tensor]) -> Tensor | None:
    """Which channels of an edge remain; None if it has lost nothing."""
    if all(bool(left[found.origin(source)].all()) for source in edge.sources):
        return None
    source = min(edge.sources)
    if source in found.absorbed and not edge.heads:
        heads, block, runs = found.absorbed[source]
        return left[heads].repeat_interleave(block).repeat(runs)
    return left[source].repeat_interleave(edge.repeat)


def shrink_move(found: Edges, node: fx.Node, left: dict[str, Tensor]) -> None:
    """Write smaller sizes where a move says sizes."""
    name = str(node.target) if node.op == "call_method" else name_of(node.target)
    if name not in (*SHAPED, *SPLITS, "unflatten"):
        return
    keep = channels_left(found, found.edges[node], left)
    if keep is None:
        return
    if name in SPLITS:
        _shrink_split(node, [_sizes(part, keep) for part in found.edges[node].labels])
        return
    shape = found.shapes[node]
    assert shape is not None
    small = _sizes(labels_of(found.edges[node], shape), keep)
    source = node.args[0]
    if name == "unflatten":
        given: Any = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
        sizes: Any = node.args[2] if len(node.args) > 2 else node.kwargs["sizes"]
        first = given % (len(shape) - len(sizes) + 1)
        node.args = (source, given, tuple(_smaller(sizes, shape[first:], small[first:])))
        node.kwargs = {}
        return
    wanted: Any = node.args[1:] if len(node.args) > 2 or not isinstance(node.args[1], (tuple, list)) else node.args[1]
    sizes = tuple(_smaller(wanted, shape, small))
    node.args = (source, *sizes) if node.op == "call_method" else (source, sizes)


def _sizes(labels: Tensor, keep: Tensor) -> tuple[int, ...]:
    """The size of what remains of a tensor with these channels."""
    kept = keep[labels]
    sizes = []
    for axis in range(kept.dim()):
        others = [d for d in range(kept.dim()) if d != axis]
        sizes.append(int((kept.any(others) if others else kept).sum()))
    if torch.Size(sizes).numel() != int(kept.sum()):
        raise ModelError("what remains of a reshaped tensor is not a tensor")
    return tuple(sizes)


def _smaller(given: Any, before: tuple[int, ...], after: tuple[int, ...]) -> list[Any]:
    """The sizes as they are written, but for those that change. −1 stays: it means what is left."""
    each = zip(given, before, after, strict=False)
    return [size if old == new or size == -1 else new for size, old, new in each]


def _shrink_split(node: fx.Node, shapes: list[tuple[int, ...]]) -> None:
    given: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    sizes = [shape[given] for shape in shapes]
    number: Any = len(sizes) if name_of(node.target) == "chunk" else sizes[0]
    if len(set(sizes)) > 1:
        raise ModelError("the pieces of a split keep different numbers of channels")
    node.args, node.kwargs = (node.args[0], number, given), {}
