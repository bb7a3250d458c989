"""BatchNorm in a network that clients train: against torch's own, with padding, pooled, and through whole rounds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior.core import batch_norm, keys
from fedprior.core.network import Network
from fedprior.core.trees import Params

D = torch.float64


class Net(nn.Module):
    """Convolution, BatchNorm of two dimensions, pool, linear layer, BatchNorm of one, linear layer."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4, **options)
        self.fc = nn.Linear(36, 6)
        self.norm1 = nn.BatchNorm1d(6, **options)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1)
        return self.out(torch.relu(self.norm1(self.fc(x))))


def network(**options: object) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net(**options).to(D)
        for name, p in module.named_parameters():
            if "norm" in name:
                nn.init.uniform_(p, 0.5, 1.5)
    return Network(module, torch.zeros(1, 8, 8, dtype=D))


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return 2 + torch.randn(count, 1, 8, 8, generator=draw, dtype=D), torch.randint(3, (count,), generator=draw)


def gradients(loss: Tensor, params: Params) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(params.values())))


def torchs_own(net: Network, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, nn.Module]:
    """The loss by torch's own modules in training mode, and the module that it has changed."""
    module = Net(momentum=1.0).to(D).train()
    module.load_state_dict(net.module.state_dict())
    out = torch.func.functional_call(module, params, (x,))
    return F.cross_entropy(out, y), module


# ---------------------------------------------------------------------- one batch
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
def test_training_equals_torchs(options):
    net = network(**options)
    params = {name: p.requires_grad_() for name, p in net.params().items()}
    x, y = examples(7)
    loss = net.training_loss(params, x, y, None, keys.key(0))
    module = Net(**options).to(D).train()
    module.load_state_dict(net.module.state_dict())
    expected = F.cross_entropy(torch.func.functional_call(module, params, (x,)), y)
    torch.testing.assert_close(loss, expected)
    for found, right in zip(gradients(loss, params), gradients(expected, params), strict=True):
        torch.testing.assert_close(found, right)


def test_no_buffer_of_the_module_changes():
    net = network()
    before = {name: buffer.clone() for name, buffer in net.module.named_buffers()}
    x, y = examples(5)
    net.training_loss(net.params(), x, y, None, keys.key(0))
    net.measure(net.params(), x, None)
    net.predict(net.params(), x)
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.module.named_buffers())


@pytest.mark.parametrize("real", [1, 3, 6])
def test_padding_does_not_enter_statistics(real):
    net = network()
    params = {name: p.requires_grad_() for name, p in net.params().items()}
    x, y = examples(6)
    x[real:] = 1e3
    weight = (torch.arange(6) < real).to(D)
    padded = net.training_with_statistics(params, x, y, weight, keys.key(0))
    alone = net.training_with_statistics(params, x[:real], y[:real], None, keys.key(0))
    torch.testing.assert_close(padded, alone)
    for a, b in zip(gradients(padded[0], params), gradients(alone[0], params), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(net.predict(params, x, weight)[:real], net.predict(params, x[:real]))
    torch.testing.assert_close(net.measure(params, x, weight), net.measure(params, x[:real], None))


def test_under_vmap_each_client_has_its_own_statistics():
    net, (x, y) = network(), examples(12)
    weight = torch.ones(3, 4, dtype=D)
    weight[1, 3:] = 0
    params = {name: torch.stack([p, 2 * p, -p]).requires_grad_() for name, p in net.params().items()}
    rows = x.unflatten(0, (3, 4)), y.unflatten(0, (3, 4)), weight, torch.stack([keys.key(i) for i in range(3)])
    losses, found = torch.func.vmap(net.training_with_statistics)(params, *rows)
    grads = gradients(losses.sum(), params)
    for i in range(3):
        mine = {name: p[i].detach().requires_grad_() for name, p in params.items()}
        kept = 3 if i == 1 else 4
        loss, alone = net.training_with_statistics(mine, rows[0][i, :kept], rows[1][i, :kept], None, rows[3][i])
        torch.testing.assert_close(losses[i], loss)
        torch.testing.assert_close({name: value[i] for name, value in found.items()}, alone)
        for a, b in zip(grads, gradients(loss, mine), strict=True):
            torch.testing.assert_close(a[i], b)


def test_measured_statistics_equal_those_torch_would_store():
    net, (x, y) = network(), examples(9)
    _, found = net.training_with_statistics(net.params(), x, y, None, keys.key(0))
    _, module = torchs_own(net, net.params(), x, y)
    torch.testing.assert_close(found["mean"], torch.cat([module.norm.running_mean, module.norm1.running_mean]))
    torch.testing.assert_close(found["variance"], torch.cat([module.norm.running_var, module.norm1.running_var]))


def test_only_without_statistics_do_predictions_depend_on_the_batch():
    net, (x, _) = network(), examples(6)
    shipped = {**net.params(), **{k: v for k, v in net.statistics().items() if k != "count"}}
    shipped["norm.running_mean"] += 0.3
    together = net.predict(shipped, x)
    torch.testing.assert_close(together, torch.cat([net.predict(shipped, row[None]) for row in x]))
    module = Net().to(D).eval()
    module.load_state_dict(shipped, strict=False)
    torch.testing.assert_close(together, module(x))
    assert not torch.allclose(net.predict(net.params(), x)[:2], net.predict(net.params(), x[:2]))


def test_measured_statistics_are_those_that_reach_each_norm_in_training():
    net, (x, _) = network(), examples(8)
    seen = []
    module = Net().to(D).train()
    module.load_state_dict(net.params(), strict=False)
    for norm in (module.norm, module.norm1):
        norm.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].transpose(0, 1).flatten(1)))
    module(x)
    found = net.measure(net.params(), x, None)
    torch.testing.assert_close(found["mean"], torch.cat([values.mean(1) for values in seen]))
    torch.testing.assert_close(found["variance"], torch.cat([values.var(1, correction=0) for values in seen]))


class Functional(nn.Module):
    """Code that calls `F.batch_norm` on buffers of its own."""

    def __init__(self, name: str = "running_mean") -> None:
        super().__init__()
        self.fc, self.name = nn.Linear(5, 3), name
        self.register_buffer(name, torch.zeros(3))
        self.register_buffer("running_var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.fc(x), getattr(self, self.name), self.running_var, training=self.training)


def test_calls_of_the_plain_function_are_intercepted():
    net = Network(Functional(), torch.zeros(5))
    x = torch.randn(6, 5)
    assert list(net.statistics()) == ["running_mean", "running_var", "count"]
    out = net.module.fc(x)
    torch.testing.assert_close(net.measure(net.params(), x, None)["mean"], out.mean(0))
    torch.testing.assert_close(net.predict(net.params(), x).mean(0), torch.zeros(3), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- many batches
def test_pooled_statistics_are_those_of_the_union():
    draw = torch.Generator().manual_seed(1)
    parts = [3 + (i + 1) * torch.randn(n, 5, generator=draw, dtype=D) for i, n in enumerate((4, 1, 9))]
    weight = torch.tensor([[len(part)] for part in parts], dtype=D)
    mean = torch.stack([part.mean(0) for part in parts])
    variance = torch.stack([part.var(0, correction=0) for part in parts])
    union = torch.cat(parts)
    found = batch_norm.pooled(mean, variance, weight)
    torch.testing.assert_close(found, (union.mean(0), union.var(0, correction=0)))
    nothing = batch_norm.pooled(mean, variance, torch.zeros_like(weight))
    assert not any(value.any() for value in nothing)
