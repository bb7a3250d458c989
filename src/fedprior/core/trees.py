"""Nested dictionaries of tensors: the form of every state and message in the library."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Tensors by name: a model's parameters, or each layer's gates."""
Gates: TypeAlias = dict[str, Tensor]
"""Gate values or probabilities: layer name → one number per gate."""
Tree: TypeAlias = dict[str, Params]
"""Sections by name, each a dictionary of tensors: a server state, a client state, a message."""

Nest = TypeVar("Nest")
"""Any nesting of dictionaries and tuples with tensors as leaves: what comes out has the type of what went in."""


def tree_map(fn: Callable[..., Tensor], tree: Nest, *rest: Any) -> Nest:
    """Apply `fn` leaf by leaf to trees of the same structure."""
    if isinstance(tree, dict):
        named = {name: tree_map(fn, child, *(other[name] for other in rest)) for name, child in tree.items()}
        return cast(Nest, named)
    if isinstance(tree, tuple):
        mapped = [tree_map(fn, *children) for children in zip(tree, *rest, strict=True)]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else cast(Nest, tuple(mapped))
    return cast(Nest, fn(tree, *rest))


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every leaf with its path, in order: `("weights/fc.bias", tensor)`."""
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from leaves(child, f"{prefix}/{name}" if prefix else name)
    else:
        yield prefix, tree


def channels_last(tensor: Tensor) -> Tensor:
    """Use the memory layout in which CPU convolutions are fastest. The values do not change."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


SMALL = 2**16
"""Joining tensors with fewer numbers than this is faster than a launch for each."""


def flat(leaf: Tensor, dims: int) -> Tensor:
    """A tensor's numbers in one row, for each index of its first `dims` dimensions."""
    return leaf.flatten(dims) if leaf.dim() > dims else leaf.unsqueeze(-1)


def map_rows(fn: Callable[..., Tensor], dims: int, tree: Nest, *rest: Nest) -> Nest:
    """`tree_map` for a function that treats all numbers behind the first `dims` dimensions alike, and keeps them last.

    It is given small tensors of a type as one: for most of them, a GPU takes longer to launch than to compute.
    """
    several = [dict(leaves(each)) for each in (tree, *rest)]
    shapes = {path: leaf.shape[dims:] for path, leaf in several[0].items()}
    mapped: Params = {}
    for paths in _alike(tree, dims):
        out = fn(*(joined_rows([each[path] for path in paths], dims) for each in several))
        pieces = out.split([shapes[path].numel() for path in paths], -1)
        mapped |= {path: x.reshape((*out.shape[:-1], *shapes[path])) for path, x in zip(paths, pieces, strict=True)}
    in_order = iter([mapped[path] for path in shapes])
    return tree_map(lambda _: next(in_order), tree)


def few_rows(tree: Any, dims: int) -> list[Tensor]:
    """A tree's numbers, for each index of its tensors' first `dims` dimensions; small tensors of a type are joined."""
    found = dict(leaves(tree))
    return [joined_rows([found[path] for path in paths], dims) for paths in _alike(tree, dims)]


def _alike(tree: Any, dims: int) -> list[list[str]]:
    """The paths of tensors that are joined; a large tensor is alone."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for path, leaf in leaves(tree):
        large = path if leaf.shape[dims:].numel() >= SMALL else ""
        groups.setdefault((large, leaf.dtype), []).append(path)
    return list(groups.values())


def joined_rows(values: Sequence[Tensor], dims: int) -> Tensor:
    """`flat` for several tensors, one after the other."""
    rows = [flat(value, dims) for value in values]
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Do `target.copy_(source)` for each pair; on a GPU, with one launch per kind of tensor."""
    if targets:
        torch._foreach_copy_(targets, sources)


def clone(tree: Nest) -> Nest:
    """Copy a tree to new memory."""
    copies = tree_map(torch.empty_like, tree)
    copy_all([leaf for _, leaf in leaves(copies)], [leaf for _, leaf in leaves(tree)])
    return copies


def stack(trees: Sequence[Nest]) -> Nest:
    """Stack trees along a new leading dimension, one row per tree."""
    return tree_map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


class Stack:
    """`stack` for trees that arrive one by one, from any thread: each is copied to its row and then not needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Any = None
        self._lock = threading.Lock()

    def put(self, index: int, tree: Any) -> None:
        """Fill one row."""
        with self._lock:
            if self.rows is None:
                self.rows = tree_map(lambda leaf: leaf.new_empty(self.count, *leaf.shape), tree)
        tree_map(lambda rows, leaf: rows[index].copy_(leaf), self.rows, tree)


def row(tree: Nest, index: int) -> Nest:
    """One row of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def count(params: Params) -> int:
    """Count the numbers in all tensors."""
    return sum(leaf.numel() for leaf in params.values())
