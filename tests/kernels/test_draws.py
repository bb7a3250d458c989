"""Keyed draws: the kernel gives the numbers that plain torch gives, bit for bit."""

import pytest
import torch
from torch.func import grad, vmap

from fedprior.core import keys
from fedprior.kernels import draws


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy, which warns of it
def test_a_batch_of_keys_draws_what_each_key_draws(device):
    each = keys.fold(keys.key(7, device), torch.arange(5, device=device))
    expected = vmap(lambda key: keys.uniform(key, (3, 700)))(each)
    assert torch.equal(vmap(lambda key: draws.uniform(key, (3, 700)))(each), expected)
    assert torch.equal(draws.uniform(each[2], (3, 700)), expected[2])
    assert torch.equal(vmap(lambda key: draws.uniform(key, (4,)), in_dims=0)(each)[:, 0], expected[:, 0, 0])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_folded_keys_and_bits_are_the_same_bit_for_bit(device):
    root = keys.key(7, device)
    each = keys.fold(root, torch.arange(5, device=device))
    numbers = torch.tensor([0, 3, -1, 2**62, -(2**63), 17, 1], device=device)
    for number in (0, 1, 16, -5, 2**62):
        mixed = keys._mix_number(number)
        assert torch.equal(draws.fold(each, mixed), keys.fold(each, number))
        assert torch.equal(draws.fold(root, mixed), keys.fold(root, number))
        assert torch.equal(vmap(lambda key, m=mixed: draws.fold(key, m))(each), keys.fold(each, number))
    assert torch.equal(draws.fold(root, numbers), keys.fold(root, numbers))
    assert torch.equal(draws.fold(each[:, None], numbers), keys.fold(each[:, None], numbers))
    many = torch.arange(66_000, device=device)  # 65 programs
    assert torch.equal(draws.fold(root, many), keys.fold(root, many))
    wide = each.expand(4, 3, 5).transpose(0, 2)
    assert torch.equal(draws.fold(wide, numbers[:4]), keys.fold(wide, numbers[:4]))
    nested = lambda fold: vmap(vmap(fold, (None, 0)), (0, None))(each, numbers)  # noqa: E731
    assert torch.equal(nested(draws.fold), nested(keys.fold))
    inner = lambda fold: vmap(lambda key: fold(key, numbers))(each)  # noqa: E731
    assert torch.equal(inner(draws.fold), inner(keys.fold))
    assert torch.equal(vmap(lambda key: draws.bits(key, 1500))(each), vmap(lambda key: keys.bits(key, 1500))(each))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_dropout_and_its_gradient_equal_the_plain_ones(device):
    each = keys.fold(keys.key(7, device), torch.arange(3, device=device))
    x, direction = (torch.randn(3, 4, 301, device=device) for _ in range(2))
    for rate in (0.25, 0.5):
        ours = vmap(lambda x, key, p=rate: draws.dropout(x, key, p))(x, each)
        torch.testing.assert_close(ours, vmap(lambda x, key, p=rate: keys.dropout(x, key, p))(x, each))
        slope = vmap(grad(lambda x, key, d, p=rate: (draws.dropout(x, key, p) * d).sum()))(x, each, direction)
        plain = vmap(grad(lambda x, key, d, p=rate: (keys.dropout(x, key, p) * d).sum()))(x, each, direction)
        torch.testing.assert_close(slope, plain)
        torch.testing.assert_close(draws.dropout(x[1], each[1], rate), ours[1])
