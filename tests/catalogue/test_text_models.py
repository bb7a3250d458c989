"""The networks for text: what they compute, and that no position sees what comes after it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedprior.catalogue.models import CharRNN, Transformer
from fedprior.core.errors import SettingError
from fedprior.core.network import Network

MODELS = {
    "transformer": lambda: Transformer(symbols=11, context=9, width=8, heads=2, layers=2),
    "lstm": lambda: CharRNN(symbols=11, width=6),
    "gru": lambda: CharRNN(symbols=11, width=6, cell="gru"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_position_depends_on_itself_and_on_what_comes_before_it(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randint(11, (3, 9))
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(x), model(changed)
    assert before.shape == (3, 9, 11)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-12)
    assert ((after[:, 5:] - before[:, 5:]).abs().amax(-1) > 1e-6).all()
    torch.testing.assert_close(model(x[:, :4]), before[:, :4], rtol=0, atol=1e-12)  # a shorter text


def test_the_transformer_is_the_one_of_the_formulas():
    """Written out position by position and head by head."""
    torch.manual_seed(1)
    model, x = MODELS["transformer"]().double(), torch.randint(11, (7,))
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    w = dict(model.named_parameters())
    h = w["symbols.weight"][x] + w["places"][:7]

    def linear(name, values):
        return values @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, values):
        centred = values - values.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    for block in ("blocks.0", "blocks.1"):
        q, k, v = (linear(f"{block}.attention.{part}", norm(f"{block}.norm1", h)) for part in "qkv")
        read = torch.zeros_like(h)
        for t in range(7):
            for head in (slice(0, 4), slice(4, 8)):
                odds = (k[: t + 1, head] @ q[t, head] / math.sqrt(4)).exp()
                read[t, head] = (odds / odds.sum()) @ v[: t + 1, head]
        h = h + linear(f"{block}.attention.out", read)
        h = h + linear(f"{block}.fc2", F.gelu(linear(f"{block}.fc1", norm(f"{block}.norm2", h))))
    torch.testing.assert_close(model(x[None])[0], norm("norm", h) @ w["symbols.weight"].T, rtol=0, atol=1e-10)


def test_the_head_is_the_embedding():
    network = Network(MODELS["transformer"](), torch.zeros(9, dtype=torch.long))
    assert network.tied == {"head.weight": "symbols.weight"}
    assert "head.weight" not in network.params()


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(SettingError, match="multiple of its heads, got 8 and 3"):
        Transformer(5, width=8, heads=3)
    with pytest.raises(SettingError, match="'lstn'"):
        CharRNN(5, cell="lstn")
    with pytest.raises(SettingError, match="at least 1"):
        CharRNN(0)
