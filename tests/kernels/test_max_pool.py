import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedprior.kernels import BatchedKernels, max_pool


def both(function, *args):
    with BatchedKernels(force=True) as mode:
        ours = function(*args)
    assert mode.routed
    return ours, function(*args)


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 3), (20, 23)])
def test_values_and_gradients_equal_torchs_even_with_ties(device, size):
    torch.manual_seed(0)
    # Few distinct values, as after ReLU: the first of equals gets the gradient.
    x = torch.randint(3, (2, 3, 2, *size), device=device).float()
    direction = torch.randn(2, 3, 2, size[0] // 2, size[1] // 2, device=device)
    pool = nn.MaxPool2d(2)
    torch.testing.assert_close(*both(vmap(pool), x))
    torch.testing.assert_close(*both(vmap(grad(lambda x, d: (pool(x) * d).sum())), x, direction))


def test_more_than_32_bits_count_the_same(device, monkeypatch):
    """So many inputs take 8 GiB; what they change is how a small tensor's are counted here."""
    launch = max_pool._launch
    wide = lambda x, windows: (launch(x, windows)[0] | {"WIDE": True}, launch(x, windows)[1])  # noqa: E731
    monkeypatch.setattr(max_pool, "_launch", wide)
    x = torch.randn(2, 1, 20, 7, 9, device=device)
    torch.testing.assert_close(*both(vmap(grad(lambda x: F.max_pool2d(x, 2).pow(2).sum())), x))


def test_nan_wins(device):
    x = torch.randn(2, 1, 1, 4, 4, device=device)
    x[:, :, :, 1, 2] = torch.nan
    torch.testing.assert_close(*both(vmap(lambda x: F.max_pool2d(x, 2)), x), equal_nan=True)


def test_differentiates_twice(device):
    x = torch.randn(2, 3, 2, 5, 4, device=device)
    slope = grad(lambda x: F.max_pool2d(x, 2).pow(3).sum())
    torch.testing.assert_close(*both(vmap(grad(lambda x: slope(x).square().sum())), x), rtol=1e-4, atol=1e-4)


def test_other_pools_go_to_torch(device):
    x = torch.randn(2, 1, 1, 6, 6, device=device)
    with BatchedKernels(force=True) as mode:
        vmap(lambda x: F.max_pool2d(x, 3))(x)
        vmap(lambda x: F.max_pool2d(x, 2, stride=1))(x)
        vmap(lambda x: F.max_pool2d(x, 2, padding=1))(x)
        vmap(lambda x: F.max_pool2d(x, 2, return_indices=True))(x)
        F.max_pool2d(x[0], 2)
    assert mode.routed == 0
