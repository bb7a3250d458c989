"""Dropout inside recurrent layers and attention: drawn from the key, and otherwise what torch computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprior
from fedprior import SettingError
from fedprior.core import keys
from fedprior.core.dropout import KeyedDropout
from fedprior.core.network import Network

KINDS = {
    "LSTM": lambda rate: nn.LSTM(8, 8, 3, batch_first=True, dropout=rate),
    "both ways": lambda rate: nn.LSTM(8, 4, 3, batch_first=True, dropout=rate, bidirectional=True),
    "projected": lambda rate: nn.LSTM(8, 9, 2, batch_first=True, dropout=rate, proj_size=8),
    "GRU": lambda rate: nn.GRU(8, 8, 2, batch_first=True, dropout=rate, bias=False),
    "RNN": lambda rate: nn.RNN(8, 8, 2, batch_first=True, dropout=rate, nonlinearity="relu"),
    "attention": lambda rate: nn.MultiheadAttention(8, 2, dropout=rate, batch_first=True),
    "encoder": lambda rate: nn.TransformerEncoderLayer(8, 2, 16, dropout=rate, batch_first=True),
    "decoder": lambda rate: nn.TransformerDecoderLayer(8, 2, 16, dropout=rate, batch_first=True),
    "function": lambda rate: nn.Identity(),
}
RECURRENT = ("LSTM", "both ways", "projected", "GRU", "RNN")


class Tokens(nn.Module):
    """Logits of 7 tokens through a layer of some kind."""

    def __init__(self, kind, rate=0.4):
        super().__init__()
        self.kind, self.rate, self.embed = kind, rate, nn.Embedding(7, 8)
        self.layer, self.out = KINDS[kind](rate), nn.Linear(8, 7)

    def forward(self, x):
        h = self.embed(x)
        if self.kind in RECURRENT:
            h = self.layer(h)[0]
        elif self.kind == "attention":
            h = self.layer(h, h, h)[0]
        elif self.kind == "decoder":
            h = self.layer(h, h)
        elif self.kind == "function":
            h = F.scaled_dot_product_attention(h, h, h, dropout_p=self.rate if self.training else 0.0, is_causal=True)
        else:
            h = self.layer(h)
        return self.out(h)


def tokens(kind, rate=0.4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tokens(kind, rate).double()


def sequences():
    draw = torch.Generator().manual_seed(1)

    def part(count):
        x = torch.randint(7, (count, 5), generator=draw)
        return x, (x + 1) % 7

    return [(*part(6 + i), *part(3)) for i in range(4)]


def run(kind, mode, algorithm="fedavg", **settings):
    task = fedprior.own_task(tokens(kind), sequences(), rounds=2, clients_per_round=3, batch_size=4, device="cpu")
    return fedprior.run(task, algorithm, mode=mode, evaluate_every=1, **settings)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in RECURRENT])
def test_attention_with_dropout_trains_the_same_in_turn_and_vectorised(kind):
    one, other = run(kind, "in-turn"), run(kind, "vectorised")
    for a, b in zip(one.records, other.records, strict=True):
        assert a == pytest.approx(b, abs=1e-9)
    again = run(kind, "in-turn")
    assert again.records == one.records
    before = tokens(kind)
    assert all(not torch.equal(p, q) for p, q in zip(one.model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_networks_with_dropout_train_only_in_turn(kind):
    one, again = run(kind, "auto"), run(kind, "in-turn", workers=1)
    assert one.records == again.records
    assert one.summary["mode"] == "in-turn"
    before = tokens(kind)
    assert all(not torch.equal(p, q) for p, q in zip(one.model.parameters(), before.parameters(), strict=True))
    with pytest.raises(SettingError, match=r"torch cannot vectorise .* set mode=in-turn"):
        run(kind, "vectorised")


@pytest.mark.parametrize("algorithm", ["fedprox", "fedadam", "fedmedian", "fedmix", "scaffold"])
@pytest.mark.parametrize("kind", ["LSTM", "encoder"])
def test_every_kind_of_ungated_algorithm_trains_them(kind, algorithm):
    result = run(kind, "in-turn", algorithm)
    assert result.summary["global_loss"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_draws_come_from_the_key_and_not_from_torchs_generator(kind):
    network, (x, y, *_) = Network(tokens(kind), torch.zeros(5, dtype=torch.int64)), sequences()[0]
    state = torch.random.get_rng_state()
    first, again, other = (network.training_losses(network.params(), x, y, keys.key(k)) for k in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert network.module.training


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout_it_equals_torch(kind):
    """Its own masks cannot be compared: only what is left when there are none, with every weight's gradient."""
    x = sequences()[0][0]
    plain = tokens(kind, 0.0).train()
    expected = plain(x)
    grads = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
    ours = copy.deepcopy(plain)
    for part in ours.modules():  # so small that nothing is dropped, and large enough to take our path
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 1e-12
    ours.rate = 1e-12
    with KeyedDropout(keys.key(0)):
        found = ours(x)
    assert torch.allclose(found, expected, atol=1e-10)
    for one, other in zip(torch.autograd.grad(found.square().sum(), list(ours.parameters())), grads, strict=True):
        assert torch.allclose(one, other, atol=1e-8)


def test_dropped_attention_is_unbiased_and_drops_the_share_asked_for():
    """With one head, v the unit matrix and equal scores, the output is the dropped probabilities themselves."""
    zero, one = torch.zeros(200, 50, 4, dtype=torch.float64), torch.eye(50, dtype=torch.float64).expand(200, 50, 50)
    with KeyedDropout(keys.key(3)):
        found = F.scaled_dot_product_attention(zero, zero, one, dropout_p=0.3)
    assert sorted(found.unique().tolist()) == pytest.approx([0.0, 1 / 50 / 0.7])
    # 500,000 draws: a standard deviation of 6.5e-4.
    assert float((found == 0).double().mean()) == pytest.approx(0.3, abs=4e-3)


def test_an_lstms_dropout_is_only_between_layers():
    """The first layer's outputs are not dropped where it is the only one, nor the last one's anywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lstm = nn.LSTM(3, 4, 2, dropout=0.5)
    x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    with KeyedDropout(keys.key(0)):
        out, (hidden, cell) = lstm(x)
    assert (out != 0).all()
    assert torch.equal(out[-1], hidden[-1])
    first = nn.LSTM(3, 4, 1)
    first.load_state_dict({name: value for name, value in lstm.state_dict().items() if name.endswith("l0")})
    below, (h, c) = first(x)
    assert torch.allclose(hidden[0], h[0])  # before the mask
    assert torch.allclose(cell[0], c[0])
    second = nn.LSTM(4, 4, 1)
    second.load_state_dict({n.replace("l1", "l0"): v for n, v in lstm.state_dict().items() if n.endswith("l1")})
    mask = keys.dropout(torch.ones_like(below), keys.fold(keys.key(0), 1), 0.5)
    assert torch.allclose(out, second(below * mask)[0], atol=1e-6)


def test_dropout_works_on_packed_sequences():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gru = nn.GRU(3, 4, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    state = torch.random.get_rng_state()
    with KeyedDropout(keys.key(0)):
        one, other = gru(packed)[0].data, gru(packed)[0].data
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(one, other)
