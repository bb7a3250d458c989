"""Where the channels of a tensor are: along one dimension, or, on the way into an attention, in several pieces."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fedprior.units.torch_operations import name_of

# Operations that only move numbers about, so that they can be run on labels in place of numbers.
MOVES = (
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
    *("squeeze", "unsqueeze", "chunk", "split", "tensor_split", "unbind", "getitem", "expand", "repeat_interleave"),
)


@dataclass(frozen=True)
class Edge:
    """A tensor's channels. Without sources, something ungated contributes, so no channel ever falls silent."""

    sources: frozenset[str] = frozenset()
    axis: int = 1
    """The dimension with the channels, or −1 where labels say which channel each number is of."""
    repeat: int = 1
    labels: Any = field(default=None, compare=False)
    """A tensor of channels, or several, for a value that contains several tensors."""
    count: int = 0
    """How many channels the labels tell apart."""
    heads: bool = False
    """Whether its channels are those of heads after their attention."""
    known: bool = True
    """Whether it is known which channel is where; not in a walk that skips what it cannot analyse."""
    moved: str = ""
    """The operation after which the channels were no longer along one dimension."""


OPEN = Edge()


class Shapes(fx.Interpreter):
    """Runs the graph once and keeps the shape of every tensor, and every number."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.shapes: dict[fx.Node, tuple[int, ...] | None] = {}
        self.numbers: dict[fx.Node, Any] = {}
        """Values without tensors, such as sizes."""
        self.containers: set[fx.Node] = set()
        """Values that are not tensors but contain some, such as the result of `chunk` or of a recurrent layer."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n] = tuple(value.shape) if isinstance(value, Tensor) else None
        if isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
            self.containers.add(n)
        elif not isinstance(value, Tensor):
            self.numbers[n] = value
        return value


def labels_of(edge: Edge, shape: tuple[int, ...]) -> Any:
    """Which channel every number of a tensor of this shape is of."""
    if edge.labels is not None:
        return edge.labels
    along = torch.arange(shape[edge.axis]).reshape(-1, *[1] * (len(shape) - 1 - edge.axis))
    return along.expand(shape)


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if callable(node.target):
        return node.target(*args, **kwargs)
    # Labels are laid out in memory in another way than numbers, which only `view` would notice.
    return getattr(args[0], "reshape" if node.target == "view" else str(node.target))(*args[1:], **kwargs)


def moved(graph: Shapes, node: fx.Node, source: fx.Node, edge: Edge) -> Edge:
    """The edge after an operation of `MOVES`: the same operation on the labels."""
    shape = graph.shapes[source]
    given = labels_of(edge, shape if shape is not None else ())
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: given if n is source else graph.numbers[n])
    found, count = _run(node, args, kwargs), edge.count or (shape[edge.axis] if shape else 0)
    text = edge.moved or f"operation {name_of(node.target)!r} at node {node.name!r}"
    return _plain(edge, found, count) or replace(edge, axis=-1, labels=found, count=count, moved=text)


def _plain(edge: Edge, labels: Any, count: int) -> Edge | None:
    """The edge with its channels along one dimension, in order and each as often, if they are."""
    for axis, size in reversed(list(enumerate(labels.shape))) if isinstance(labels, Tensor) else ():
        along = torch.arange(size) // max(1, size // count)
        spread = along.reshape(-1, *[1] * (labels.dim() - 1 - axis))
        if size % count == 0 and bool((labels == spread).all()):
            return replace(edge, axis=axis, repeat=edge.repeat * (size // count), labels=None, count=0, moved="")
    return None
