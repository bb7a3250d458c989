"""Heads and feed-forward neurons of transformers, in every form that users write them in."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.models import Transformer
from fedprior.core.errors import ModelError
from fedprior.units import UnitGating, find_structure

WIDTH, HEADS, SYMBOLS, PLACES = 8, 4, 7, 5
SIZE = WIDTH // HEADS


class Text(nn.Module):
    """Symbols, an attention that adds to the stream, two layers that add to it, and an output."""

    def __init__(self, attend: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.symbols, self.attend = nn.Embedding(SYMBOLS, WIDTH), attend
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        for name, part in parts.items():
            self.add_module(name, part)
        self.fc1, self.fc2, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x)
        x = x + self.attend(self, self.norm1(x))
        return self.head(self.norm2(x + self.fc2(F.gelu(self.fc1(x)))).mean(1))


def apart(s: Any, x: Tensor) -> Tensor:
    n, t, _ = x.shape
    q, k, v = (part(x).view(n, t, HEADS, SIZE).permute(0, 2, 1, 3) for part in (s.q, s.k, s.v))
    read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return s.out(read.transpose(1, 2).contiguous().view(n, t, WIDTH))


def in_chunks(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (q, k, v))
    return s.out(F.scaled_dot_product_attention(q * 0.5, k, v).transpose(1, 2).flatten(2))


def by_head(s: Any, x: Tensor) -> Tensor:
    """Each head's queries, keys and values follow each other."""
    n, t, _ = x.shape
    q, k, v = s.qkv(x).reshape(n, t, HEADS, 3 * SIZE).transpose(1, 2).split(SIZE, dim=-1)
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, WIDTH))


def indexed(s: Any, x: Tensor) -> Tensor:
    n, t, _ = x.shape
    qkv = s.qkv(x).reshape(n, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    read = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
    return s.out(read.transpose(1, 2).reshape(n, t, WIDTH))


def grouped(s: Any, x: Tensor) -> Tensor:
    """Two query heads for each pair of keys and values."""
    q = s.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    k, v = (part(x).unflatten(-1, (HEADS // 2, SIZE)).transpose(1, 2) for part in (s.k, s.v))
    return s.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


def repeated(s: Any, x: Tensor) -> Tensor:
    q = s.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    k, v = (part(x).unflatten(-1, (HEADS // 2, SIZE)).transpose(1, 2) for part in (s.k, s.v))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, 1)
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def linears(**widths: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(WIDTH, width) for name, width in widths.items()} | {"out": nn.Linear(WIDTH, WIDTH)}


def torchs(batch_first: bool = True, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 6, 0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.head = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, 3)
        self.block = nn.TransformerDecoderLayer(WIDTH, HEADS, 6, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x)
        return self.head(self.block(x, x.flip(1)).mean(1))


# The network, its heads' layers with how many units each has, and which of the parameters are of the first of these.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], str]] = {
    "ours": (
        lambda: Transformer(SYMBOLS, PLACES, WIDTH, HEADS, 2),
        {"blocks.0.attention": HEADS, "blocks.1.attention": HEADS},
        r"blocks.0.attention.[qkv]\.",
    ),
    "apart": (lambda: Text(apart, **linears(q=8, k=8, v=8)), {"q+k+v": HEADS}, r"[qkv]\."),
    "in chunks": (lambda: Text(in_chunks, **linears(qkv=24)), {"qkv": HEADS}, r"qkv\."),
    "by head": (lambda: Text(by_head, **linears(qkv=24)), {"qkv": HEADS}, r"qkv\."),
    "indexed": (lambda: Text(indexed, **linears(qkv=24)), {"qkv": HEADS}, r"qkv\."),
    "grouped": (lambda: Text(grouped, **linears(q=8, k=4, v=4)), {"q+k+v": 2}, r"[qkv]\."),
    "repeated": (lambda: Text(repeated, **linears(q=8, k=4, v=4)), {"q+k+v": 2}, r"[qkv]\."),
    "MultiheadAttention": (
        lambda: Text(
            lambda s, x: s.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(8, HEADS, batch_first=True)
        ),
        {"mha": HEADS},
        r"mha\.in_proj",
    ),
    "MultiheadAttention, keys of another width": (
        lambda: Text(
            lambda s, x: s.mha(x, x[..., :4], x[..., :6])[0],
            mha=nn.MultiheadAttention(8, HEADS, batch_first=True, kdim=4, vdim=6),
        ),
        {"mha": HEADS},
        r"mha\.([qkv]_proj|in_proj)",
    ),
    "TransformerEncoder": (
        lambda: Text(lambda s, x: s.encoder(x), encoder=torchs()),
        {"encoder.layers.0.self_attn": HEADS, "encoder.layers.1.self_attn": HEADS},
        r"encoder.layers.0.self_attn.in_proj",
    ),
    "TransformerEncoder, norms first": (
        lambda: Text(lambda s, x: s.encoder(x), encoder=torchs(norm_first=True, activation="gelu", bias=False)),
        {"encoder.layers.0.self_attn": HEADS, "encoder.layers.1.self_attn": HEADS},
        r"encoder.layers.0.self_attn.in_proj",
    ),
    "TransformerDecoderLayer": (
        Decoder,
        {"block.self_attn": HEADS, "block.multihead_attn": HEADS},
        r"block.self_attn.in_proj",
    ),
}
EXAMPLE = torch.arange(PLACES) % SYMBOLS
BUILT: dict[str, tuple[nn.Module, UnitGating]] = {}


def built(name: str) -> tuple[nn.Module, UnitGating]:
    if name not in BUILT:
        model = NETWORKS[name][0]().double()
        BUILT[name] = model, UnitGating(find_structure(model, EXAMPLE))
    return BUILT[name]


def random_params(model: nn.Module, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {k: torch.randn(p.shape, generator=draw, dtype=p.dtype) * 0.5 for k, p in model.named_parameters()}


def outputs(model: nn.Module, params: dict[str, Tensor], seed: int = 0) -> Tensor:
    x = torch.randint(SYMBOLS, (3, PLACES), generator=torch.Generator().manual_seed(seed))
    return fedprior.Network(model, EXAMPLE).predict(params, x)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_units_are_heads_and_feed_forward_neurons_and_nothing_else(name):
    model, gating = built(name)
    _, heads, owned = NETWORKS[name]
    found = {layer.name: layer for layer in gating.structure.layers}
    assert {layer.name: layer.size for layer in found.values() if layer.blocks} == heads
    neurons = [layer for layer in found.values() if not layer.blocks]
    assert all(re.search(r"(fc1|linear1)$", layer.name) for layer in neurons)
    assert len(neurons) == sum(re.search(r"(fc1|linear1)$", n) is not None for n, _ in model.named_modules())
    assert set(found[next(iter(heads))].parameters) == {n for n, _ in model.named_parameters() if re.match(owned, n)}
    assert {r.parameter for r in gating.structure.readers} == {
        n for n, _ in model.named_parameters() if re.search(r"(out|out_proj|fc2|linear2)\.weight$", n)
    }


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000), probability=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_what_reads_a_closed_unit_may_go_too(name, seed, probability):
    """`apply` zeroes what units own; `prune` also what reads them. The function is the same, the size what is left."""
    model, gating = built(name)
    params, draw = random_params(model, seed), torch.Generator().manual_seed(seed)
    gates = {k: (torch.rand(shape, generator=draw) < probability).double() for k, shape in gating.gate_shapes.items()}
    pruned = gating.prune(params, gates)
    found, expected = outputs(model, pruned, seed), outputs(model, gating.apply(params, gates), seed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert int(gating.effective_parameters(gates)) == sum(int(value.count_nonzero()) for value in pruned.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_closed_head_is_that_head_without_an_output(name):
    """The rows that a gate closes are one head's: the others' outputs stay as they are. Seen where the reader reads."""
    model, gating = built(name)
    params = random_params(model, 1)
    readers = {reader.sources[0]: reader for reader in gating.structure.readers}
    for layer, count in NETWORKS[name][1].items():
        reader = readers[layer]
        for closed in range(count):
            gates = gating.all_open(params)
            gates[layer][closed] = 0
            silenced = dict(params)
            columns = torch.arange(WIDTH) // reader.repeat != closed
            silenced[reader.parameter] = params[reader.parameter] * columns
            assert reader.repeat * count == WIDTH
            found, expected = outputs(model, gating.apply(params, gates)), outputs(model, silenced)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            assert not torch.allclose(found, outputs(model, params), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["apart", "by head", "grouped", "MultiheadAttention"])
def test_norms_and_sizes_of_heads_are_those_of_a_loop(name):
    model, gating = built(name)
    params = random_params(model, 2)
    for layer, count in NETWORKS[name][1].items():
        for head in range(count):
            gates = gating.all_open(params)
            gates[layer][head] = 0
            applied = gating.apply(params, gates)
            lost = torch.cat([(params[k] - applied[k]).flatten() for k in params])
            assert float(gating.norms(params)[layer][head]) == pytest.approx(float(lost.norm()), rel=1e-12)
            assert gating.sizes()[layer] == int(lost.count_nonzero())
            matrices = torch.cat([(params[k] - applied[k]).flatten() for k in params if params[k].dim() > 1])
            magnitudes = gating.part(gating.magnitudes(params))[layer][head]
            assert float(magnitudes) == pytest.approx(float(matrices.norm()), rel=1e-12)


def layers_of(model: nn.Module, **options: Any) -> list[str]:
    return [layer.name for layer in find_structure(model, EXAMPLE, **options).layers]


def test_heads_can_be_left_without_gates():
    assert layers_of(NETWORKS["ours"][0](), ungated=["blocks.1.attention"]) == [
        *("blocks.0.attention", "blocks.0.fc1", "blocks.1.fc1")
    ]
    assert layers_of(NETWORKS["apart"][0](), ungated=["q"]) == ["fc1"]
    assert layers_of(NETWORKS["TransformerEncoder"][0](), ungated=["encoder.layers.0.self_attn", "fc1"]) == [
        *("encoder.layers.0.linear1", "encoder.layers.1.self_attn", "encoder.layers.1.linear1")
    ]
    with pytest.raises(ModelError, match=r"'heads' is not a convolution, linear layer or attention.*mha"):
        layers_of(NETWORKS["MultiheadAttention"][0](), ungated=["heads"])


def test_single_heads_and_heads_with_a_bias_beside_their_keys_have_no_gates():
    """A single head is the whole attention. A bias that joins the values remains when a head is closed."""
    assert layers_of(Transformer(SYMBOLS, PLACES, WIDTH, 1, 1)) == ["blocks.0.fc1"]
    for mha in (nn.MultiheadAttention(8, 1), nn.MultiheadAttention(8, 4, add_bias_kv=True)):
        assert layers_of(Text(lambda s, x: s.mha(x, x, x)[0], mha=mha)) == ["fc1"]


def test_frozen_heads_have_no_gates_and_shared_ones_are_refused():
    model = NETWORKS["MultiheadAttention"][0]()
    model.mha.requires_grad_(False)
    assert layers_of(model) == ["fc1"]
    model = NETWORKS["TransformerEncoder"][0]()
    first, second = (model.encoder.layers[i].self_attn for i in (0, 1))
    second.in_proj_weight = first.in_proj_weight
    with pytest.raises(ModelError, match=r"shares 'encoder.layers.0.self_attn.in_proj_weight'.*ungated=encoder"):
        layers_of(model)


def across_places(s: Any, x: Tensor) -> Tensor:
    """Attention between channels: a channel is not in one head."""
    q, k, v = (part(x).transpose(1, 2) for part in (s.q, s.k, s.v))
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))


def interleaved(s: Any, x: Tensor) -> Tensor:
    """Heads are not blocks of rows."""
    q, k, v = (part(x).unflatten(-1, (SIZE, HEADS)).movedim(-1, 1) for part in (s.q, s.k, s.v))
    return s.out(F.scaled_dot_product_attention(q, k, v).movedim(1, -1).flatten(2))


def read_twice(s: Any, x: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (s.q, s.k, s.v))
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + s.other(
        k.transpose(1, 2).flatten(2)
    )


def shuffled(s: Any, x: Tensor) -> Tensor:
    """The queries of two heads are exchanged, so a head is in different rows of the queries and of the keys."""
    q, k, v = s.q(x)[..., [0, 1, 4, 5, 2, 3, 6, 7]], s.k(x), s.v(x)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (q, k, v))
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def without_transposing(s: Any, x: Tensor) -> Tensor:
    """A well-known slip: every head reads other channels at every place."""
    q, k, v = (part(x).reshape(x.shape[0], HEADS, PLACES, SIZE) for part in (s.q, s.k, s.v))
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def fused_and_read_twice(s: Any, x: Tensor) -> Tensor:
    qkv = s.qkv(x)
    q, k, v = qkv.chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (q, k, v))
    return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + s.wide(qkv)


@pytest.mark.parametrize(
    "attend", [across_places, interleaved, read_twice, fused_and_read_twice, shuffled, without_transposing]
)
def test_an_attention_without_separate_heads_is_refused_with_a_remedy_that_works(attend):
    every = {"other": nn.Linear(WIDTH, WIDTH), "wide": nn.Linear(3 * WIDTH, WIDTH)}
    model = Text(attend, **linears(q=8, k=8, v=8, qkv=24), **every)
    with pytest.raises(ModelError) as refusal:
        layers_of(model)
    advised = re.search(r"ungated=([\w.,+]+)", str(refusal.value))
    assert advised is not None
    assert layers_of(model, ungated=advised[1].split(",")) == ["fc1"]
