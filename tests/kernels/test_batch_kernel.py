import pytest
import torch
from torch.func import grad, vmap

from fedprior.core.batch_norm import moments
from fedprior.kernels.batch_norm import _plain, batch_norm

SHAPES = [(2, 3, 4, 5, 3), (3, 1, 2, 4, 4), (1, 3, 2, 40, 60), (2, 5, 3)]
CASES = [
    *[(SHAPES[0], affine, masked) for affine in (False, True) for masked in (False, True)],
    *[(shape, True, True) for shape in SHAPES[1:]],
]


def tensors(shape, device):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device) * 3 + 1
    weight, bias = (torch.randn(shape[0], shape[2], device=device) for _ in range(2))
    mask = torch.ones(shape[:2], device=device)
    mask[0, 2:] = 0
    return x, mask, weight, bias, torch.randn_like(x)


def plain(x, mask, weight, bias, eps):
    """By its definition, for one client."""
    shape = (-1, *[1] * (x.dim() - 2))
    mean, variance = moments(x, mask)
    normal = (x - mean.reshape(shape)) * (variance.reshape(shape) + eps).rsqrt()
    return (normal if weight is None else normal * weight.reshape(shape) + bias.reshape(shape)), mean, variance


@pytest.mark.parametrize(("shape", "affine", "masked"), CASES)
def test_values_and_gradients_are_those_of_the_definition(device, shape, affine, masked):
    x, mask, weight, bias, direction = tensors(shape, device)
    given = {"x": x, "d": direction} | ({"w": weight, "b": bias} if affine else {}) | ({"m": mask} if masked else {})

    def value(function, t):
        return function(t["x"], t.get("m"), t.get("w"), t.get("b"), 1e-3)

    found, expected = (vmap(lambda t, f=f: value(f, t))(given) for f in (batch_norm, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    slopes = [vmap(grad(lambda t, f=f: (value(f, t)[0] * t["d"]).sum()))(given) for f in (batch_norm, plain)]
    for name in set(given) - {"m", "d"}:
        torch.testing.assert_close(slopes[0][name], slopes[1][name], rtol=1e-4, atol=1e-4)


def test_models_within_clients(device):
    """A mixture's clients look at all its models: one `vmap` within another, the inputs batched by the outer alone."""
    x, mask, weight, bias, _ = tensors(SHAPES[0], device)
    weights, biases = (torch.stack([p, 2 * p, -p], 1) for p in (weight, bias))

    def models(function):
        one = vmap(lambda w, b, x, m: function(x, m, w, b, 1e-3)[0], (0, 0, None, None))
        return vmap(one)(weights, biases, x, mask)

    torch.testing.assert_close(models(batch_norm), models(plain), rtol=1e-4, atol=1e-4)


def test_differentiates_twice(device):
    x, mask, weight, bias, direction = tensors(SHAPES[0], device)

    def penalty(function, x, w, b, m, d):
        loss = lambda x, w, b: (function(x, m, w, b, 1e-3)[0].tanh() * d).sum()  # noqa: E731
        return sum(g.square().sum() for g in grad(loss, (0, 1, 2))(x, w, b))

    found, expected = (
        vmap(grad(lambda *args, f=f: penalty(f, *args), (0, 1, 2)))(x, weight, bias, mask, direction)
        for f in (batch_norm, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


def test_the_fallback_equals_the_gradient(device):
    x, mask, weight, bias, direction = tensors(SHAPES[0], device)
    slope = grad(lambda x, w, b, m, d: (plain(x, m, w, b, 1e-3)[0] * d).sum(), (0, 1, 2))
    expected = vmap(slope)(x, weight, bias, mask, direction)
    torch.testing.assert_close(_plain(direction, x, mask, weight, 1e-3), expected, rtol=1e-4, atol=1e-4)
