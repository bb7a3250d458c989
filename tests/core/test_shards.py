"""Who owns which rows, and what is refused, on a handful of examples."""

import math

import numpy as np
import pytest
import torch

from fedprior.catalogue.data.partition import _random_state
from fedprior.catalogue.data.schemes import classes, quantity
from fedprior.core.errors import DataError
from fedprior.core.federated import FederatedData, Shards


def client(count: int, tests: int = 0, first: float = 0.0) -> tuple[torch.Tensor, ...]:
    x = first + torch.arange(count * 3, dtype=torch.float32).reshape(count, 3)
    return x, torch.arange(count) % 2, x[:tests] + 100, torch.arange(tests) % 2


def test_a_client_has_only_its_own_rows() -> None:
    shards = Shards.of([np.array([4, 1]), np.array([], np.int64), np.array([0, 2, 3])])
    assert [shards[client].tolist() for client in range(3)] == [[4, 1], [], [0, 2, 3]]
    assert [shards.size(client) for client in range(3)] == [2, 0, 3]
    assert shards.sizes.tolist() == [2, 0, 3]
    assert len(shards) == 3
    assert Shards.of([np.array([3, 1]), np.array([1, 2])]).distinct.tolist() == [1, 2, 3]
    for row, owner in ((4, 0), (1, 0), (0, 2), (3, 2)):
        assert shards.owner(torch.arange(5) == row) == owner


def test_examples_of_clients_are_joined_in_order() -> None:
    data = FederatedData.from_clients([client(2, 1), client(3, 2, 50.0)])
    assert data.x[data.train[1]].tolist() == client(3, 2, 50.0)[0].tolist()
    assert data.test_x[data.test[1]].tolist() == client(3, 2, 50.0)[2].tolist()
    assert data.classes == 2


@pytest.mark.parametrize("label", [-1, 2, 3])
@pytest.mark.parametrize("part", [1, 3])
def test_a_label_that_is_no_class_is_refused(part: int, label: int) -> None:
    """Two classes: 0 and 1."""
    clients = [client(2, 2), client(3, 2), client(4, 2)]
    clients[1][part][1] = label
    with pytest.raises(DataError, match=f"client 1 has the .* label {label}"):
        FederatedData.from_clients(clients, classes=2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 2])
def test_a_number_that_is_not_finite_is_refused_with_its_client(part: int, bad: float) -> None:
    clients = [client(2, 2), client(3, 2), client(4, 2)]
    clients[1][part][1, 2] = bad
    with pytest.raises(DataError, match=r"client 1 has .* not finite"):
        FederatedData.from_clients(clients)


def test_seeds_of_more_than_32_bits_have_their_own_partitions() -> None:
    seeds = (5, 5 + 2**32, 5 + 2**33, -5, 5 - 2**63)
    assert len({_random_state(seed).randint(2**31, size=4).tobytes() for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_clients_with_too_few_examples_take_from_the_largest(least: int) -> None:
    """With a concentration next to zero one client would have everything."""
    labels = np.arange(60) % 4
    for seed in range(5):
        for scheme in (classes, quantity):
            train, _ = scheme(labels, labels[:0], 15, 0.01, seed, least)
            sizes = [len(rows) for rows in train]
            assert min(sizes) == least
            assert sorted(np.concatenate(train).tolist()) == list(range(60))
