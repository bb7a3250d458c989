"""Gates in kernels against the plain operations of the prior and its gating, values and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import fedprior
from fedprior.core import keys
from fedprior.kernels import concrete, gates, registration
from fedprior.priors import thresholds
from fedprior.units.rows import Rows, row_norms, scale_rows

LAYERS = (Rows(5, 2), Rows(3, 1), Rows(4, 3), Rows(2, 1))
SHAPES = [(5, 3, 2, 2), (5,), (3, 1500), (4, 7), (4,), (4,), (2,)]


def tensors(device, clients=2):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(clients, *shape, generator=draw).to(device) for shape in SHAPES]


def gate_vector(device, clients=2):
    return torch.rand(clients, 14, generator=torch.Generator().manual_seed(1)).to(device)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[24, 3, 1])
def layers_per_launch(request, monkeypatch):
    monkeypatch.setattr(gates, "LAYERS", request.param)


def test_norms_equal_those_of_the_rows(device, layers_per_launch):
    given = [t for t in tensors(device) if t.dim() > 2]
    expected = torch.cat([t.flatten(2).square().sum(-1).sqrt() for t in given], 1)
    for norms in (gates.norms, row_norms):
        close(vmap(lambda *t, f=norms: f(t))(*given), expected)
        close(norms([t[1] for t in given]), expected[1])


def test_products_and_both_gradients_equal_torchs(device, layers_per_launch):
    given, z = tensors(device), gate_vector(device)
    directions = [torch.randn_like(t) for t in given]

    def value(scale):
        def weighed(z, *t):
            return sum((s * d).sum() for s, d in zip(scale(z, t[:7]), t[7:], strict=True))

        return weighed

    ours = lambda z, t: gates.scale(LAYERS, z, t)  # noqa: E731
    plain = lambda z, t: scale_rows(LAYERS, z, t)  # noqa: E731
    every = tuple(range(8))
    close(*(vmap(lambda z, *t, f=f: tuple(f(z, t)))(z, *given) for f in (ours, plain)))
    close(
        vmap(grad(value(ours), every))(z, *given, *directions), vmap(grad(value(plain), every))(z, *given, *directions)
    )
    leaves = [t.clone().requires_grad_() for t in (z, *given)]
    out = vmap(lambda z, *t: tuple(ours(z, t)))(*leaves)
    found = torch.autograd.grad(out, leaves, directions)
    close(list(found), list(vmap(grad(value(plain), every))(z, *given, *directions)))


def test_products_differentiate_twice(device):
    given, z = tensors(device), gate_vector(device)

    def penalty(scale):
        def cubes(z, t):
            return sum(s.pow(3).sum() for s in scale(z, t))

        return lambda z, *t: sum(g.square().sum() for g in grad(lambda z: cubes(z, t))(z))

    ours = penalty(lambda z, t: gates.scale(LAYERS, z, t))
    plain = penalty(lambda z, t: scale_rows(LAYERS, z, t))
    torch.testing.assert_close(vmap(grad(ours))(z, *given), vmap(grad(plain))(z, *given), rtol=1e-3, atol=1e-2)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy, which warns of it
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_and_their_gradient_equal_the_priors(device, each, masked):
    draw = torch.Generator().manual_seed(2)
    norms = torch.rand(3, 300, generator=draw).to(device)
    v = (4 * torch.randn(3, 300, generator=draw)).to(device)
    v[:, :4], v[:, 4:8] = -100.0, 30.0
    is_open = (torch.rand(3, 300, generator=draw) < 0.7).to(device)
    temperature = torch.tensor([0.3, 0.4, 0.5], device=device)
    edges = concrete.Edges(-50.0, thresholds.OPEN, thresholds.CLOSED)

    def plain(norms, v, is_open, t):
        logits = (norms - torch.nn.functional.softplus(v)) / t
        logits = torch.where(v < -50.0, thresholds.OPEN, logits)
        logits = torch.where(is_open, logits, thresholds.CLOSED) if masked else logits
        return logits, logits.sigmoid()

    def ours(norms, v, is_open, t):
        return concrete.logits_and_gates(norms, v, is_open if masked else None, t if each else 0.3, edges)

    def weighed(f):
        def value(v, norms, is_open, t, a, b):
            logits, probabilities = f(norms, v, is_open, t)
            return (logits.clamp(min=-1e3) * a).sum() + (probabilities * b).sum()

        return vmap(grad(value))

    t = temperature if each else torch.full_like(temperature, 0.3)
    a, b = torch.randn(3, 300, device=device), torch.randn(3, 300, device=device)
    close(vmap(ours)(norms, v, is_open, t), vmap(plain)(norms, v, is_open, t))
    close(weighed(ours)(v, norms, is_open, t, a, b), weighed(plain)(v, norms, is_open, t, a, b))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy, which warns of it
def test_draws_and_their_gradient_equal_the_priors(device):
    logits = (3 * torch.randn(3, 700, generator=torch.Generator().manual_seed(3))).to(device)
    logits[:, :5] = thresholds.CLOSED
    each = keys.fold(keys.key(0, device), torch.arange(3, device=device))
    direction = torch.randn_like(logits)
    plain = lambda logit, key: thresholds.hard_concrete(logit, keys.uniform(key, (700,)))  # noqa: E731
    ours = registration.draw_gates
    drawn = vmap(ours)(logits, each)
    close(drawn, vmap(plain)(logits, each))
    assert {0.0, 1.0} <= set(drawn.flatten().tolist())
    slope = lambda f: vmap(grad(lambda x, k, d: (f(x, k) * d).sum()))(logits, each, direction)  # noqa: E731
    close(slope(ours), slope(plain))


def biased():
    """Groups of a row and a bias, as LeNet-5 has them."""
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 4))


def normed():
    """Groups of a row, a norm's weight and its bias, as ResNet20 has them."""
    convolutions = [nn.Conv2d(1, 6, 3, bias=False), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False)]
    return nn.Sequential(*convolutions, nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("model", [biased, normed])
def test_a_clients_gradient_is_the_same_with_and_without_kernels(device, model):
    """The prior's own code, on either path: a packet of which some gates are closed, one vectorised step."""
    torch.manual_seed(0)
    network = fedprior.Network(model(), torch.zeros(1, 6, 6))
    algorithm = fedprior.algorithm("fedsparse", network, temperature=0.05, dense_rounds=1)
    prior = algorithm.prior
    server = {k: {n: v.to(device) for n, v in s.items()} for k, s in algorithm.init(network.params()).items()}
    server["age"]["rounds"] += 1
    packet = prior.broadcast(prior.prune(server), keys.key(0, device))
    first = next(iter(packet["gates"]))
    packet["gates"][first][:3] = 0.0
    each = keys.fold(keys.key(1, device), torch.arange(2, device=device))

    def value(local, key):
        received = prior.receive(packet)
        expected = prior.expect(local, received)
        params = prior.relax(expected, received, key)
        data = sum((p * math.sqrt(i + 1)).sin().sum() for i, p in enumerate(params.values()))
        return data - 100 * prior.tempered_log_prob(expected, received)

    start = prior.adopt(packet, each[0], None)
    local = {k: {n: v.expand(2, *v.shape).clone() for n, v in s.items()} for k, s in start.items()}
    expected, left = vmap(grad(value))(local, each), prior.prune(server)
    registration.register_for(lambda x: True, force=True)
    found, pruned = vmap(grad(value))(local, each), prior.prune(server)
    for section, values in expected.items():
        for name, theirs in values.items():
            torch.testing.assert_close(found[section][name], theirs, rtol=1e-3, atol=1e-4, msg=f"{section}/{name}")
    for section in ("weights", "thresholds", "open"):
        torch.testing.assert_close(pruned[section], left[section], rtol=1e-4, atol=1e-4)
