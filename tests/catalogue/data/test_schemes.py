"""Partitions by name: what each promises, for any labels and seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedprior
from fedprior import DataError, SettingError
from fedprior.catalogue.data import PARTITIONS, clients_from, divide
from fedprior.core.federated import fingerprint

LABELLED = [name for name in PARTITIONS if name != "column"]


def some_labels(count, classes=5, seed=0):
    return np.random.RandomState(seed).randint(0, classes, count)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PARTITIONS),
    st.integers(1, 12),
    st.integers(0, 60),
    st.sampled_from([1e-9, 0.05, 0.5, 10.0, 1e6]),
    st.integers(0, 2**40),
)
def test_no_example_twice_no_client_empty_one_partition_per_seed(name, clients, more, alpha, seed):
    labels, test_labels = some_labels(24 + more, seed=seed % 1000), some_labels(12 + more, seed=seed % 1000 + 1)
    owners, test_owners = (np.arange(len(part)) % clients for part in (labels, test_labels))
    given = {"partition": name, "clients": clients, "alpha": alpha}
    given |= {"owners": owners, "test_owners": test_owners} if name == "column" else {}
    train, test = divide(labels, test_labels, seed=seed, **given)
    assert len(train) == len(test) == clients
    for parts, count in ((train, len(labels)), (test, len(test_labels))):
        rows = np.concatenate(parts)
        assert len(set(rows.tolist())) == len(rows)
        assert all(0 <= row < count for row in rows)
    assert min(len(rows) for rows in train) >= (1 if name in ("iid", "dirichlet") else 2)
    again = divide(torch.from_numpy(labels), test_labels.tolist(), seed=seed, **given)
    assert fingerprint(again[0] + again[1]) == fingerprint(train + test)


@pytest.mark.parametrize("name", ["iid", "shards", "classes", "quantity"])
def test_every_training_example_has_a_client(name):
    train, _ = divide(some_labels(103), partition=name, clients=7, alpha=0.3)
    assert sorted(np.concatenate(train).tolist()) == list(range(103))


def test_iid_sizes_differ_by_at_most_one_and_mixes_only_by_chance():
    labels = some_labels(10_000, 4)
    train, test = divide(labels, labels, partition="iid", clients=7)
    for parts in (train, test):
        assert {len(rows) for rows in parts} == {1428, 1429}
        # 1,428 draws: a share's standard deviation is 1.1 points.
        assert all(abs(np.bincount(labels[rows]) / len(rows) - 0.25).max() < 0.06 for rows in parts)


def test_shards_give_a_client_few_classes_and_test_examples_of_the_same():
    labels = np.repeat(np.arange(10), 60)
    train, test = divide(labels, np.repeat(np.arange(10), 20), partition="shards", clients=30, shards_each=2)
    for rows, held in zip(train, test, strict=True):
        assert len(rows) == 20
        counts = np.bincount(labels[rows], minlength=10)
        assert sorted(counts[counts > 0]) in ([10, 10], [20])  # shards of ten lie within a class
        assert len(held) == 200 // 30
    own = [set(np.repeat(np.arange(10), 20)[held]) <= set(labels[rows]) for rows, held in zip(train, test, strict=True)]
    assert np.mean(own) > 0.7  # the last clients take what is left


def test_classes_and_quantity_skew_only_what_they_name():
    labels = np.repeat(np.arange(5), 2000)

    def spread(name, alpha):
        train, _ = divide(labels, partition=name, clients=10, alpha=alpha, seed=3)
        sizes = np.array([len(rows) for rows in train])
        # A client of a handful of examples has a mix by chance.
        mixes = [np.bincount(labels[rows], minlength=5) / len(rows) for rows in train if len(rows) > 500]
        return sizes.std() / sizes.mean(), max(abs(mix - 0.2).max() for mix in mixes)

    assert spread("quantity", 0.5)[0] > 0.5
    assert spread("quantity", 0.5)[1] < 0.08  # 500 draws: four standard deviations are 7 points
    assert spread("classes", 0.2)[1] > 0.4
    assert max(*spread("classes", 1e5), *spread("quantity", 1e5)) < 0.08


def test_a_classes_share_of_the_test_set_is_that_of_the_training_set():
    labels = np.repeat(np.arange(3), 1000)
    train, test = divide(labels, labels, partition="classes", clients=6, alpha=0.5)
    for rows, held in zip(train, test, strict=True):
        assert np.abs(np.bincount(labels[rows], minlength=3) - np.bincount(labels[held], minlength=3)).max() <= 2


def test_a_column_makes_one_client_per_user_in_name_order():
    owners = np.array(["eve", "bob", "eve", "ann", "bob", "eve"])
    train, test = divide(np.zeros(6), partition="column", owners=owners, test_owners=np.array(["bob", "ann", "zoe"]))
    assert [rows.tolist() for rows in train] == [[1, 4], [0, 2, 5]]  # ann has one example: left out
    assert [rows.tolist() for rows in test] == [[0], []]


def test_clients_from_one_set_train_with_a_share_of_each_held_out():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw)
    x[:, 0] = torch.arange(200)
    y = torch.arange(200) % 4
    clients = clients_from(x, y, partition="classes", clients=10, alpha=0.5, seed=1, test_fraction=0.25)
    assert sorted(int(row) for c in clients for part in (c[0], c[2]) for row in part[:, 0]) == list(range(200))
    for own_x, own_y, test_x, test_y in clients:
        assert torch.equal(own_y, own_x[:, 0].long() % 4)
        assert torch.equal(test_y, test_x[:, 0].long() % 4)
        total = len(own_y) + len(test_y)
        assert len(test_y) == max(min(round(0.25 * total), total - 2), 0)
    task = fedprior.own_task(nn.Linear(3, 4), clients, rounds=1, clients_per_round=3)
    assert fedprior.run(task, "fedavg").summary["rounds"] == 1
    given = clients_from(x[:150], y[:150], test=(x[150:], y[150:]), partition="iid", clients=5)
    assert [(len(c[1]), len(c[3])) for c in given] == [(30, 10)] * 5
    real = clients_from(x, x[:, :2], partition="quantity", clients=5, alpha=1.0)
    assert sum(len(c[1]) + len(c[3]) for c in real) == 200


@pytest.mark.parametrize("kind", [Tensor.tolist, Tensor.numpy])
def test_arrays_and_lists_are_divided_like_tensors(kind):
    x, y = torch.arange(40.0)[:, None].repeat(1, 3), torch.arange(40) % 4
    told = {"partition": "classes", "clients": 5, "alpha": 0.5, "seed": 3}
    ours, theirs = clients_from(x, y, **told), clients_from(kind(x), kind(y), **told)
    assert all(
        torch.equal(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert fedprior.own_task(nn.Linear(3, 4), theirs).data.clients == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": "shard"}, "unknown partition 'shard'; did you mean 'shards'"),
        ({"partition": "column"}, "needs the column"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"clients": 50}, "50 clients cannot share 40"),
        ({"partition": "shards", "clients": 30}, "not enough to give 30 clients 2 each"),
        ({"partition": "classes", "alpha": 0.0}, "alpha must be above 0"),
        ({"partition": "shards", "shards_each": 0}, "shards must be at least 1"),
        ({"alfa": 3}, "unexpected keyword argument 'alfa'"),
        ({"test_fraction": 1.0}, "test_fraction must be"),
        ({"clients": "many"}, "clients must be a whole number, got 'many'"),
        ({"partition": "dirichlet", "alpha": "x"}, "alpha must be a number, got 'x'"),
        ({"partition": "column", "owners": ["a", "b"]}, "owners has 2 users for 40 examples"),
        (
            {"partition": "column", "owners": ["a", "b"] * 20, "test": (torch.zeros(4, 3), torch.arange(4))},
            "test_owners has 0 users for 4 examples",
        ),
        ({"owners": ["a", "b"] * 20}, "only partition='column' takes owners, not 'iid'"),
        ({"test": (torch.zeros(4, 3),)}, "test must be two tensors"),
        ({"test": (torch.zeros(4, 3), torch.zeros(3))}, "4 inputs but 3 targets in test"),
        (
            {"test": ({"words": torch.zeros(4, 3), "mask": torch.zeros(2)}, torch.zeros(4))},
            "there are 4 words, 2 mask but 4 targets in test",
        ),
        ({"test": (torch.zeros(4, 3), ["a"] * 4)}, "test cannot become tensors"),
    ],
)
def test_impossible_partitions_are_one_line_errors(given, message):
    with pytest.raises((SettingError, DataError), match=message):
        clients_from(torch.zeros(40, 3), torch.arange(40) % 4, **{"clients": 5, **given})
    with pytest.raises(DataError, match="needs one label per example"):
        clients_from(torch.zeros(40, 3), torch.rand(40), partition="dirichlet", clients=5)
