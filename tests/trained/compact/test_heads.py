"""Without its closed heads and neurons a transformer is as small as its gates say, and computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedprior
from fedprior.catalogue.models import Transformer
from fedprior.trained.compact import compact, export_module, load_module
from fedprior.units import UnitGating, find_structure

WIDTH, HEADS, SIZE, SYMBOLS, PLACES = 8, 4, 2, 7, 5
EXAMPLE = torch.arange(PLACES) % SYMBOLS
CAUSAL = torch.ones(PLACES, PLACES).triu(1).bool()


class Text(nn.Module):
    """Symbols, then what is given, then an output; masks are buffers."""

    def __init__(self, run: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.run, self.symbols, self.head = run, nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, 3)
        for name, part in parts.items():
            self.add_module(name, part)
        self.register_buffer("hidden", CAUSAL)
        self.register_buffer("added", torch.zeros(PLACES, PLACES).masked_fill(CAUSAL, -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, self.symbols(x), x))


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 6, 0.1, **options)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(layer(**options), 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def attend(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


def fused(s: Any, x: Tensor, _: Tensor) -> Tensor:
    n, t, w = x.shape
    q, k, v = s.qkv(x).split(w, dim=2)
    q, k, v = (part.view(n, t, HEADS, w // HEADS).transpose(1, 2) for part in (q, k, v))
    read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + s.out(read.transpose(1, 2).contiguous().view(n, t, w))


def indexed(s: Any, x: Tensor, _: Tensor) -> Tensor:
    n, t, w = x.shape
    qkv = s.qkv(x).reshape(n, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    return x + s.out(F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]).transpose(1, 2).reshape(n, t, w))


NETWORKS = {
    "ours": lambda: Transformer(SYMBOLS, PLACES, WIDTH, HEADS, 1),
    "split": lambda: Text(fused, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH)),
    "indexed": lambda: Text(indexed, qkv=nn.Linear(WIDTH, 3 * WIDTH, bias=False), out=nn.Linear(WIDTH, WIDTH)),
    "encoder": lambda: Text(lambda s, x, _: s.encoder(x), encoder=encoder(batch_first=True)),
    "encoder, places first": lambda: Text(
        lambda s, x, _: s.encoder(x.transpose(0, 1), mask=s.hidden).transpose(0, 1),
        encoder=encoder(norm_first=True, activation="gelu"),
    ),
    "encoder, added mask": lambda: Text(
        lambda s, x, _: s.encoder(x, s.added, is_causal=True), encoder=encoder(batch_first=True, bias=False)
    ),
    "layer, padding": lambda: Text(
        lambda s, x, i: s.layer(x, src_key_padding_mask=i == 6), layer=layer(batch_first=True)
    ),
    "layer, padding and mask": lambda: Text(
        lambda s, x, i: s.layer(x, s.hidden, i == 6), layer=layer(batch_first=True)
    ),
    "layer, added padding": lambda: Text(
        lambda s, x, i: s.layer(x, src_key_padding_mask=torch.where(i == 6, -torch.inf, 0.0)),
        layer=layer(batch_first=True),
    ),
    "layer, added padding and mask": lambda: Text(
        lambda s, x, i: s.layer(x, s.added, torch.where(i == 6, -torch.inf, 0.0)),
        layer=layer(batch_first=True, norm_first=True),
    ),
    "attention": lambda: Text(
        lambda s, x, i: x + s.mha(x, x, x, key_padding_mask=i == 6, need_weights=False)[0], mha=attend()
    ),
    "attention, other widths": lambda: Text(
        lambda s, x, _: x + s.mha(x, x[..., :3], x[..., 2:6], attn_mask=s.hidden)[0], mha=attend(kdim=3, vdim=4)
    ),
}


def pruned(model: nn.Module, seed: int = 0) -> tuple[nn.Module, dict[str, tuple[int, int]], int]:
    """The model with some units closed, how many are open, and how many parameters that leaves."""
    gating = UnitGating(find_structure(model, EXAMPLE))
    draw = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(p.shape, generator=draw) * 0.3 for name, p in model.named_parameters()}
    gates = gating.all_open(params)
    for i, gate in enumerate(gates.values()):
        gate[i % 2 :: 2] = 0
    model.load_state_dict(gating.prune(params, gates), strict=False)
    units = {name: (int(gate.sum()), len(gate)) for name, gate in gates.items()}
    return model.eval(), units, int(gating.effective_parameters(gates))


def inputs(count: int = 6) -> Tensor:
    """Some symbols are padding (6), but never the first: it must have something to read."""
    drawn = torch.randint(SYMBOLS, (6, PLACES), generator=torch.Generator().manual_seed(3))
    assert (drawn[:, 1:] == 6).any()
    return torch.cat([drawn[:, :1] % 6, drawn[:, 1:]], 1)[:count]


@pytest.mark.parametrize("name", NETWORKS)
def test_closed_heads_and_neurons_are_gone_and_outputs_equal(name):
    model, units, size = pruned(NETWORKS[name]())
    small = compact(model, EXAMPLE)
    assert small.note == ""
    assert small.units == units
    assert sum(p.numel() for p in small.module.parameters()) == size
    with torch.no_grad():
        torch.testing.assert_close(small.module(inputs()), model(inputs()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ours", "layer, padding and mask"])
def test_an_export_is_plain_torch_and_onnx_and_predicts_the_same(name, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    model, units, size = pruned(NETWORKS[name]())
    export_module(model, inputs(), tmp_path / "small", about={}, with_onnx=True)
    about = json.loads((tmp_path / "small" / "model.json").read_text())
    assert about["units"] == {key: list(value) for key, value in units.items()}
    assert about["notes"] == []
    for kind in ("torch", "onnx"):
        assert about["compared"][kind]["same_predictions"] == len(inputs())
    assert about["sizes"]["compact"]["parameters"] == about["sizes"]["compact onnx"]["parameters"] == size
    text = (tmp_path / "small" / "model.py").read_text()
    assert "fedprior" not in text.partition('"""\n')[2]
    loaded = load_module(tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(loaded(inputs(2)), model(inputs(2)), rtol=0, atol=1e-5)


def test_what_cannot_be_made_smaller_is_exported_whole():
    """A decoder's blocks, and an attention with a bias beside its keys, stay as torch has them."""
    block = nn.TransformerDecoderLayer(WIDTH, HEADS, 6, batch_first=True)
    bias = attend(add_bias_kv=True)
    for model in (
        Text(lambda s, x, _: s.block(x, x), block=block),
        Text(
            lambda s, x, _: x + s.mha(x, x, x)[0] + s.two(F.relu(s.one(x))),
            mha=bias,
            one=nn.Linear(8, 6),
            two=nn.Linear(6, 8),
        ),
    ):
        model, units, _ = pruned(model)
        small = compact(model, EXAMPLE)
        with torch.no_grad():
            torch.testing.assert_close(small.module(inputs(1)), model(inputs(1)), rtol=0, atol=1e-5)
        assert small.units in ({}, units)
        assert bool(small.note) == (small.units == {})


def test_predictions_of_a_run_survive_its_export(tmp_path: Path):
    """The whole way: a cohort trains, gates close, `fedprior.export` ships a network with fewer heads."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(SYMBOLS, (40, PLACES), generator=draw)
    clients = fedprior.clients_from(x, x.roll(1, 1), clients=4, partition="iid")
    torch.manual_seed(0)
    model = Transformer(SYMBOLS, PLACES, WIDTH, HEADS, 1)
    task = fedprior.own_task(model, clients, rounds=2, batch_size=4, clients_per_round=2)
    chosen = fedprior.algorithm("fednarrow", task.network, sparsity=0.5)
    result = fedprior.run(task, chosen, out=tmp_path / "run")
    about = fedprior.export(result, tmp_path / "small", onnx=False)
    assert about["sizes"]["compact"]["parameters"] == result.summary["effective_parameters"]
    assert about["units"]["blocks.0.attention"][0] < HEADS
    assert about["compared"]["torch"]["same_predictions"] == about["compared"]["torch"]["inputs"]
