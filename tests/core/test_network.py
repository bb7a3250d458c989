"""A model as a function: the loss of a padded batch, and dropout that is drawn from a key."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core import keys
from fedprior.core.network import Network, cross_entropy
from fedprior.core.trees import Params


class Mask(nn.Module):
    """What dropout does to ones, as the network's output; `scale` is there to be differentiated."""

    def __init__(self, drop: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.drop = drop
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self, x * self.scale)


def output_itself(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss through which the test sees the outputs: Σ output · target of each example."""
    return (outputs * targets).flatten(1).sum(1)


KINDS: dict[str, tuple[Callable[[float], nn.Module], tuple[int, ...]]] = {
    "module": (lambda p: Mask(lambda s, x: s.d(x), d=nn.Dropout(p)), (60,)),
    "1d": (lambda p: Mask(lambda s, x: s.d(x), d=nn.Dropout1d(p)), (20, 3)),
    "2d": (lambda p: Mask(lambda s, x: s.d(x), d=nn.Dropout2d(p)), (20, 2, 2)),
    "3d": (lambda p: Mask(lambda s, x: s.d(x), d=nn.Dropout3d(p)), (20, 2, 1, 2)),
    "function": (lambda p: Mask(lambda s, x: F.dropout(x, p, s.training)), (60,)),
    "inplace": (lambda p: Mask(lambda s, x: s.d(x), d=nn.Dropout(p, inplace=True)), (60,)),
}


def masks(kind: str, p: float, key: Tensor, batch: int = 50) -> Tensor:
    """The multiplier that each entry gets: the gradient of Σ output in the input."""
    build, shape = KINDS[kind]
    network = Network(build(p), torch.ones(shape), output_itself)
    x = torch.ones(batch, *shape, requires_grad=True)
    loss = network.training_loss(network.params(), x, torch.ones(batch, *shape), None, key)
    (grad,) = torch.autograd.grad(loss, x)
    return grad * batch


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_scales_the_rest(kind, p):
    found = torch.cat([masks(kind, p, keys.key(seed)) for seed in range(4)])
    kept = found != 0
    assert torch.allclose(found[kept], torch.tensor(1 / (1 - p)))
    per_channel = kept.flatten(2)[:, :, 0] if found.dim() > 2 else kept
    deviation = (p * (1 - p) / per_channel.numel()) ** 0.5
    assert abs(float((~per_channel).float().mean()) - p) < 5 * deviation


@pytest.mark.parametrize("kind", ["1d", "2d", "3d"])
def test_channelwise_dropout_drops_whole_channels(kind):
    found = masks(kind, 0.5, keys.key(0)).flatten(2)
    assert bool((found == found[:, :, :1]).all())
    assert 0 < float((found == 0).float().mean()) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_a_function_of_its_key(kind):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = masks(kind, 0.5, keys.key(1))
    again = masks(kind, 0.5, keys.key(1))
    other = masks(kind, 0.5, keys.key(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_zero_and_one_equal_torchs(kind):
    assert bool((masks(kind, 0.0, keys.key(0)) == 1).all())
    assert bool((masks(kind, 1.0, keys.key(0)) == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_predict_has_no_dropout(kind):
    build, shape = KINDS[kind]
    network = Network(build(0.5), torch.ones(shape))
    x = torch.randn(5, *shape)
    network.training_loss(network.params(), x, torch.zeros(5, *shape[1:], dtype=torch.long), None, keys.key(0))
    assert torch.equal(network.predict(network.params(), x), x)


def test_two_dropout_layers_have_independent_draws():
    network = Network(Mask(lambda s, x: torch.stack([F.dropout(x), F.dropout(x)], 1)), torch.ones(200), output_itself)
    drawn = []
    for place in range(2):
        x = torch.ones(1, 200, requires_grad=True)
        target = torch.zeros(1, 2, 200).index_fill(1, torch.tensor(place), 1)
        loss = network.training_loss(network.params(), x, target, None, keys.key(3))
        drawn.append(torch.autograd.grad(loss, x)[0] != 0)
    agreement = float((drawn[0] == drawn[1]).float().mean())
    assert abs(agreement - 0.5) < 5 * 0.5 / 200**0.5


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.Dropout2d(0.4),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(48, 4),
    )


def test_dropout_is_the_same_under_vmap_as_alone():
    network = Network(dropout_net(), torch.zeros(1, 6, 6))
    clients = 5
    params = {
        name: p + 0.1 * torch.randn((clients, *p.shape), generator=torch.Generator().manual_seed(1))
        for name, p in network.params().items()
    }
    x, y = torch.randn(clients, 7, 1, 6, 6), torch.randint(4, (clients, 7))
    weight = (torch.arange(7) < torch.tensor([[7], [3], [1], [5], [7]])).float()
    client_keys = keys.fold(keys.key(0), torch.arange(clients))
    gradient = torch.func.grad_and_value(network.training_loss)
    grads, losses = torch.func.vmap(gradient)(params, x, y, weight, client_keys)
    for i in range(clients):
        mine = {name: value[i].clone().requires_grad_() for name, value in params.items()}
        loss = network.training_loss(mine, x[i], y[i], weight[i], client_keys[i])
        assert float(loss.detach()) == pytest.approx(float(losses[i]), rel=1e-5)
        for name, grad in zip(mine, torch.autograd.grad(loss, list(mine.values())), strict=True):
            assert torch.allclose(grads[name][i], grad, atol=1e-5), name
    without = torch.func.vmap(network.evaluation_loss)(params, x, y, weight)
    assert not torch.allclose(losses, without)


# ---------------------------------------------------------------------- the loss


def linear() -> Network:
    return Network(nn.Linear(3, 4), torch.zeros(3))


def losses_of(params: Params, x: Tensor, y: Tensor) -> list[float]:
    """Cross-entropy, one example at a time, from its definition."""
    logits = (x @ params["weight"].T + params["bias"]).double()
    return [float(row.exp().sum().log() - row[label]) for row, label in zip(logits, y, strict=True)]


def test_the_loss_of_a_batch_is_the_mean_of_its_examples():
    network = linear()
    x, y = torch.randn(6, 3), torch.randint(4, (6,))
    each = losses_of(network.params(), x, y)
    assert cross_entropy(network.predict(network.params(), x), y).tolist() == pytest.approx(each, rel=1e-5)
    loss = network.training_loss(network.params(), x, y, None, keys.key(0))
    assert float(loss) == pytest.approx(sum(each) / 6, rel=1e-5)


@pytest.mark.parametrize("real", [1, 4, 6])
def test_padding_changes_neither_loss_nor_gradient(real):
    network = linear()
    params = {name: p.requires_grad_() for name, p in network.params().items()}
    x, y = torch.randn(6, 3), torch.randint(4, (6,))
    x[real:] *= 1e3
    weight = (torch.arange(6) < real).float()
    padded = network.training_loss(params, x, y, weight, keys.key(0))
    alone = network.training_loss(params, x[:real], y[:real], None, keys.key(0))
    assert float(padded.detach()) == pytest.approx(float(alone.detach()), rel=1e-5)
    for a, b in zip(*(torch.autograd.grad(v, list(params.values())) for v in (padded, alone)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_batch_of_nothing_but_padding_costs_nothing():
    network = linear()
    params = {name: p.requires_grad_() for name, p in network.params().items()}
    loss = network.training_loss(
        params, torch.randn(4, 3), torch.zeros(4, dtype=torch.long), torch.zeros(4), keys.key(0)
    )
    grads = torch.autograd.grad(loss, list(params.values()))
    assert float(loss.detach()) == 0
    assert not any(grad.any() for grad in grads)


def test_a_users_loss_is_used():
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(1)

    network = Network(nn.Linear(3, 2), torch.zeros(3), squared)
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    expected = float((network.predict(network.params(), x) - y).square().sum() / 5)
    assert float(network.training_loss(network.params(), x, y, None, keys.key(0))) == pytest.approx(expected)


# ---------------------------------------------------------------------- parameters


def test_predict_uses_the_parameters_it_is_given_and_leaves_the_modules_own():
    module = nn.Linear(3, 2)
    network = Network(module, torch.zeros(3))
    before = module.weight.detach().clone()
    x, w, b = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2)
    assert torch.allclose(network.predict({"weight": w, "bias": b}, x), x @ w.T + b, atol=1e-6)
    assert torch.equal(module.weight, before)
    network.params()["weight"].zero_()
    assert torch.equal(module.weight, before)


def test_params_are_those_that_train():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    network = Network(module, torch.zeros(3))
    assert set(network.params()) == {"1.weight", "1.bias"}
    x = torch.randn(4, 3)
    zeros = {name: torch.zeros_like(value) for name, value in network.params().items()}
    assert not network.predict(zeros, x).any()


class Twice(nn.Module):
    """One linear layer that is registered under two names, and a second one that shares the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.net = nn.Sequential(self.a, nn.Tanh())
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.net(x))


def test_modules_under_two_names_and_shared_weights_are_one_parameter():
    module = Twice()
    network = Network(module, torch.zeros(3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert set(network.params()) == {"a.weight", "a.bias", "b.bias"}
    x, w = torch.randn(4, 3), torch.randn(3, 3)
    given = {"a.weight": w, "a.bias": torch.ones(3), "b.bias": torch.zeros(3)}
    for _ in range(2):
        assert torch.allclose(network.predict(given, x), torch.tanh(x @ w.T + 1) @ w.T, atol=1e-6)
        network.training_loss(given, x, torch.zeros(4, dtype=torch.long), None, keys.key(0))
    assert all(isinstance(value, nn.Parameter) for value in (module.a.weight, module.a.bias, module.net[0].weight))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
