"""Linear layers of a cohort against torch's own. They are torch's products, so no GPU is needed."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedprior.kernels import BatchedKernels
from fedprior.kernels.linear import linear

NEEDS_TRITON = False


def tensors(device, inner=(4,)):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, *inner, 5), torch.randn(3, 2, 5), torch.randn(3, 2)
    return x.to(device), weight.to(device), bias.to(device)


@pytest.mark.parametrize("inner", [(4,), (2, 3), ()])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_equal_torchs(device, inner, biased):
    x, weight, bias = tensors(device, inner)

    def value(x, w, b):
        return F.linear(x, w, b if biased else None)

    slope = vmap(grad(lambda x, w, b: value(x, w, b).tanh().sum(), (0, 1, 2)))
    expected, expected_slope = vmap(value)(x, weight, bias), slope(x, weight, bias)
    with BatchedKernels(force=True) as mode:
        torch.testing.assert_close(vmap(value)(x, weight, bias), expected)
        torch.testing.assert_close(slope(x, weight, bias), expected_slope)
    assert mode.routed == 2


def test_the_weights_gradient_has_their_memory_layout(device):
    x, weight, bias = (t.requires_grad_() for t in tensors(device))
    out = vmap(linear)(x, weight, bias)
    for value, slope in zip((x, weight, bias), torch.autograd.grad(out.sum(), (x, weight, bias)), strict=True):
        assert slope.stride() == value.stride()


def test_differentiates_twice_and_under_two_vmaps(device):
    x, weight, bias = tensors(device)
    x, weight, bias = (t.expand(2, *t.shape) * torch.tensor([1.0, 2.0], device=device).reshape(-1, *[1] * t.dim())
                       for t in (x, weight, bias))  # fmt: skip

    def penalty(w, x, b):
        return grad(lambda w: F.linear(x, w, b).pow(3).sum())(w).square().sum()

    curve = vmap(vmap(grad(penalty)))
    expected = curve(weight, x, bias)
    with BatchedKernels(force=True):
        torch.testing.assert_close(curve(weight, x, bias), expected, rtol=1e-4, atol=1e-3)


def test_weights_that_all_clients_share_go_to_torch(device):
    x, weight, bias = tensors(device)
    with BatchedKernels(force=True) as mode:
        vmap(F.linear, (0, None, None))(x, weight[0], bias[0])
        F.linear(x[0], weight[0])
    assert mode.routed == 0
