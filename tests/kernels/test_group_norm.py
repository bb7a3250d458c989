import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedprior.kernels import BatchedKernels

SHAPES = [(2, 3, 4, 5, 3, 2), (3, 1, 6, 4, 4, 1), (1, 2, 9, 1, 7, 3)]


def tensors(shape, device):
    clients, images, channels, rows, columns, groups = shape
    torch.manual_seed(0)
    x = torch.randn(clients, images, channels, rows, columns, device=device) * 3 + 1
    weight, bias = (torch.randn(clients, channels, device=device) for _ in range(2))
    return x, weight, bias, torch.randn_like(x), groups


def both(function, *args):
    with BatchedKernels(force=True) as mode:
        ours = function(*args)
    assert mode.routed
    return ours, function(*args)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_torchs(device, shape):
    x, weight, bias, direction, groups = tensors(shape, device)
    value = lambda x, w, b: F.group_norm(x, groups, w, b, 1e-3)  # noqa: E731
    torch.testing.assert_close(*both(vmap(value), x, weight, bias), rtol=1e-4, atol=1e-4)
    slope = vmap(grad(lambda x, w, b, d: (value(x, w, b) * d).sum(), (0, 1, 2)))
    torch.testing.assert_close(*both(slope, x, weight, bias, direction), rtol=1e-4, atol=1e-4)


def test_without_weights(device):
    x, _, _, direction, groups = tensors(SHAPES[0], device)
    slope = vmap(grad(lambda x, d: (F.group_norm(x, groups) * d).sum()))
    torch.testing.assert_close(*both(slope, x, direction), rtol=1e-4, atol=1e-4)


def test_weights_that_all_clients_share(device):
    x, weight, bias, direction, groups = tensors(SHAPES[0], device)
    loss = lambda x, w, b, d: (F.group_norm(x, groups, w, b) * d).sum()  # noqa: E731
    slope = vmap(grad(loss, (0, 1, 2)), (0, None, None, 0))
    torch.testing.assert_close(*both(slope, x, weight[0], bias[0], direction), rtol=1e-4, atol=1e-4)


def test_differentiates_twice(device):
    x, weight, bias, direction, groups = tensors(SHAPES[0], device)
    loss = lambda x, w, b, d: (F.group_norm(x, groups, w, b).tanh() * d).sum()  # noqa: E731

    def penalty(*args):
        return sum(g.square().sum() for g in grad(loss, (0, 1, 2))(*args))

    curve = vmap(grad(penalty, (0, 1, 2)))
    torch.testing.assert_close(*both(curve, x, weight, bias, direction), rtol=1e-3, atol=1e-2)


def test_groups_too_large_for_registers_go_to_torch(device):
    x = torch.randn(2, 1, 2, 200, 100, device=device)
    with BatchedKernels(force=True) as mode:
        vmap(lambda x: F.group_norm(x, 1))(x)
    assert mode.routed == 0
