"""torch's attention and encoder spelled out in layers, so that heads can be removed: torch's own has a fixed number."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedprior.core.errors import ModelError

MASKS = ("mask", "src_mask", "attn_mask", "src_key_padding_mask", "key_padding_mask")
POSITIONS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("", "", "", "key_padding_mask", "", "attn_mask"),
    nn.TransformerEncoderLayer: ("", "src_mask", "src_key_padding_mask"),
    nn.TransformerEncoder: ("", "mask", "src_key_padding_mask"),
}
"""Where a call has masks."""


def spelled_out(module: nn.Module, example: Tensor) -> nn.Module:
    """A copy in which the attentions and encoders that torch ships are made of linear layers and norms."""
    whole = copy.deepcopy(module).eval()
    for name, part, masks in list(_calls(whole, example)):
        if len(masks) > 1:
            raise ModelError(f"module {name!r} has masks of different types")
        new = _spelled(name, part, bool(masks - {torch.bool}))
        whole = new if not name else whole
        if name:
            whole.set_submodule(name, new)
    return whole


class _Kinds(fx.Interpreter):
    """Runs a graph once and keeps what type the numbers of each tensor have."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.kinds: dict[fx.Node, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.kinds[n] = value.dtype
        return value


def _calls(module: nn.Module, example: Tensor) -> Iterator[tuple[str, nn.Module, set[torch.dtype]]]:
    """Every call of one of torch's modules: its name, the module, and the types of the masks that it is given."""
    if not any(type(part) in POSITIONS for part in module.modules()):
        return
    # A root that is itself such a module would be traced into.
    graph = fx.symbolic_trace(_Root(module) if type(module) in POSITIONS else module)
    found = _Kinds(graph)
    with torch.no_grad():
        found.run(example.unsqueeze(0))
    for node in graph.graph.nodes:
        part = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if part is not None and type(part) in POSITIONS:
            given = dict(zip(POSITIONS[type(part)], node.args, strict=False)) | node.kwargs
            masks = {found.kinds[given[role]] for role in MASKS if given.get(role) in found.kinds}
            yield str(node.target).removeprefix("root").removeprefix("."), part, masks


class _Root(nn.Module):
    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Any:
        return self.root(x)


def _spelled(name: str, part: nn.Module, additive: bool) -> nn.Module:
    if isinstance(part, nn.MultiheadAttention):
        return Attention(name, part, additive)
    return Encoder(name, part, additive) if isinstance(part, nn.TransformerEncoder) else Block(name, part, additive)


class Attention(nn.Module):
    """`nn.MultiheadAttention` without the weights that it returns."""

    def __init__(self, name: str, of: nn.MultiheadAttention, additive: bool) -> None:
        super().__init__()
        if of.bias_k is not None or of.add_zero_attn:
            raise ModelError(f"module {name!r} attends to a bias or to zeros beside its keys")
        self.size, self.batch_first, self.additive = of.head_dim, of.batch_first, additive
        apart = [of.q_proj_weight, of.k_proj_weight, of.v_proj_weight]
        weights = apart if of.in_proj_weight is None else of.in_proj_weight.chunk(3)
        biases = [None] * 3 if of.in_proj_bias is None else of.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out = _linear(of.out_proj.weight, of.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        q, k, v = self._split(self.q(query)), self._split(self.k(key)), self._split(self.v(value))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(attn_mask, key_padding_mask))
        joined = read.transpose(1, 2).flatten(2)
        out: Tensor = self.out(joined if self.batch_first else joined.transpose(0, 1))
        return out, None

    def _mask(self, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """What is added to the scores, or where they count. torch's masks are true where they do not."""
        hidden = None if padding is None else padding.unsqueeze(1).unsqueeze(1)
        if mask is None:
            return hidden if hidden is None or self.additive else hidden.logical_not()
        if self.additive:
            return mask if hidden is None else torch.add(hidden, mask)
        return (mask if hidden is None else torch.logical_or(hidden, mask)).logical_not()

    def _split(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        split: Tensor = x.unflatten(-1, (-1, self.size)).transpose(1, 2)
        return split


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


class Block(nn.Module):
    """`nn.TransformerEncoderLayer`."""

    def __init__(self, name: str, of: Any, additive: bool) -> None:
        super().__init__()
        self.norm_first, self.activation = of.norm_first, of.activation
        self.self_attn = Attention(f"{name}.self_attn", of.self_attn, additive)
        self.linear1, self.linear2, self.norm1, self.norm2 = of.linear1, of.linear2, of.norm1, of.norm2

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch's, without dropout."""

        def attend(x: Tensor) -> Tensor:
            read: Tensor = self.self_attn(x, x, x, key_padding_mask=src_key_padding_mask, attn_mask=src_mask)[0]
            return read

        def neurons(x: Tensor) -> Tensor:
            out: Tensor = self.linear2(self.activation(self.linear1(x)))
            return out

        x = src
        if self.norm_first:
            x = x + attend(self.norm1(x))
            return x + neurons(self.norm2(x))
        x = self.norm1(x + attend(x))
        return self.norm2(x + neurons(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """`nn.TransformerEncoder`."""

    def __init__(self, name: str, of: nn.TransformerEncoder, additive: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(f"{name}.layers.{i}", part, additive) for i, part in enumerate(of.layers))
        self.norm = of.norm

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As torch's, without dropout."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask)
        return src if self.norm is None else self.norm(src)
