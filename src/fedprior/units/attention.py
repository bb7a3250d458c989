"""The units of a transformer: attention heads, and the neurons between the two layers of torch's own blocks.

A *head* is its rows in the queries', keys' and values' projections, and the columns that read it in the output's. With
its values zero it adds nothing, whatever its queries and keys say.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.units.structure import Layer, Reader
from fedprior.units.torch_operations import ZERO_PRESERVING_MODULES

BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
ATTENTIVE = (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *BLOCKS)
"""torch's modules with attention within, which a trace does not enter."""


class Found(NamedTuple):
    """A group of units within one of torch's modules, and the weight that reads them."""

    layer: Layer
    reader: Reader
    writer: str
    """The layer that this weight is of; it adds to the residual stream."""


def within(name: str, module: nn.Module) -> Iterator[Found]:
    """The heads and the feed-forward neurons of one of torch's modules."""
    parts = dict(module.named_modules(prefix=name))
    for inner, part in parts.items():
        block, _, last = inner.rpartition(".")
        around = parts.get(block)
        if isinstance(part, nn.MultiheadAttention):
            yield _heads(inner, part)
        elif last == "linear1" and isinstance(around, BLOCKS) and isinstance(part, nn.Linear):
            # Where the activation lifts a zero, neurons have no gates.
            count = part.out_features if _keeps_zero(around.activation) else 1
            owned = tuple(f"{inner}.{key}" for key, _ in part.named_parameters())
            second = f"{block}.linear2"
            yield Found(Layer(inner, count, owned, "linear"), Reader(f"{second}.weight", (inner,), 1), second)


def _keeps_zero(activation: Any) -> bool:
    return activation in (F.relu, F.gelu) or isinstance(activation, ZERO_PRESERVING_MODULES)


def _heads(name: str, part: nn.MultiheadAttention) -> Found:
    every = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    owned = tuple(f"{name}.{key}" for key in every if getattr(part, key) is not None)
    # A bias that joins the keys and values stays when a head is closed, so such heads have no gates.
    count = 1 if part.bias_v is not None else part.num_heads
    layer = Layer(name, count, owned, "linear", blocks=(part.head_dim,) * len(owned))
    writer = f"{name}.out_proj"
    return Found(layer, Reader(f"{writer}.weight", (name,), part.head_dim), writer)


class Heads(NamedTuple):
    """Heads that were found by which channels an attention's inputs hold."""

    number: int
    blocks: dict[str, int]
    """For each layer whose outputs they are, how many consecutive rows belong to one head."""
    labels: Tensor
    """For every number of the attention's output, which column it is for its reader, head by head."""
    width: int
    """How many columns a head has there."""


def find_heads(sources: Sequence[str], labels: Sequence[Tensor], sizes: dict[str, int]) -> Heads | None:
    """The heads of an attention whose queries, keys and values hold these channels of these layers.

    Query heads that share keys and values are one unit. None if the heads are not separate, or not in blocks of rows.
    """
    queries, keys, values = (_across_heads(part) for part in labels)
    shape = (*labels[0].shape[:-1], labels[2].shape[-1])
    if queries is None or keys is None or values is None or not len(queries) == len(keys) == len(values):
        return None
    heads = [_numbered(part) for part in (keys, values)]
    if not torch.equal(*heads):
        return None
    head, count = heads[0], int(heads[0].max()) + 1
    blocks = {}
    for layer in dict.fromkeys(sources):
        owner = torch.full((sizes[layer],), -1)
        for source, rows in zip(sources, (queries, keys, values), strict=True):
            if source == layer:
                taken = owner[rows]
                if bool(((taken >= 0) & (taken != head[:, None])).any()):
                    return None
                owner[rows] = head[:, None].expand(rows.shape)
        block = int((owner == owner[0]).cumprod(0).sum())
        if not torch.equal(owner, torch.arange(len(owner)) // block % count) or len(owner) % (block * count):
            return None
        blocks[layer] = block
    # Columns are counted head by head; several queries of one head follow each other.
    each = len(queries) // count
    within = torch.stack([(head[:m] == head[m]).sum() for m in range(len(head))])
    if len(queries) % count or int(within.max()) >= each:
        return None
    first = (head * each + within) * shape[-1]
    lead = torch.Size(shape[:-2])
    columns = (first[:, None, None] + torch.arange(shape[-1])).expand(-1, shape[-2], -1)
    return Heads(count, blocks, columns.reshape(*lead, *shape[-2:]), each * shape[-1])


def _across_heads(labels: Tensor) -> Tensor | None:
    """For each head of each example, its channels; None if they differ from place to place."""
    one = labels.select(-2, 0)
    return one.flatten(0, -2) if bool((labels == one.unsqueeze(-2)).all()) else None


def _numbered(rows: Tensor) -> Tensor:
    """Number equal rows alike, in the order in which they come."""
    first = (rows[:, None] == rows[None]).all(-1).to(torch.int64).argmax(1)
    known = first.unique()
    return torch.searchsorted(known, first)


def heads_name(sources: Sequence[str]) -> str:
    """The heads of a fused projection have its name; others that of the module with the projections."""
    if len(set(sources)) == 1:
        return sources[0]
    parents = {source.rpartition(".")[0] for source in sources}
    parent, last = min(parents), "+".join(source.rpartition(".")[2] for source in sources)
    return parent if len(parents) == 1 and parent else f"{parent}.{last}".removeprefix(".")
