"""Keyed draws: the kernel gives the numbers that plain torch gives, bit for bit."""

import pytest
import torch
from torch.func import vmap

from fedprior import keys
from fedprior.kernels import draws


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy, which warns of it
def test_a_batch_of_keys_draws_what_each_draws_alone(device, monkeypatch):
    monkeypatch.setattr("fedprior.kernels.available", lambda: False)
    each = keys.fold(keys.key(7, device), torch.arange(5, device=device))
    expected = vmap(lambda key: keys.uniform(key, (3, 700)))(each)
    assert torch.equal(vmap(lambda key: draws.uniform(key, 2100).reshape(3, 700))(each), expected)
    assert torch.equal(draws.uniform(each[2], 2100).reshape(3, 700), expected[2])
    assert torch.equal(vmap(lambda key: draws.uniform(key, 4), in_dims=0)(each)[:, 0], expected[:, 0, 0])
