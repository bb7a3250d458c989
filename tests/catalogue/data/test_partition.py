"""The partitions: who gets what, and that a seed names it for ever."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprior
from fedprior import DataError, SettingError
from fedprior.catalogue.data import dirichlet, partition
from fedprior.core import federated

LABELS = np.repeat(np.arange(10), 100)
TEST_LABELS = np.repeat(np.arange(10), 20)


def fingerprint(parts):
    text = ";".join(",".join(str(int(row)) for row in part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def heterogeneity(parts, labels):
    """Mean total variation between a client's classes and everybody's."""
    shares = np.array([np.bincount(labels[part], minlength=10) / len(part) for part in parts])
    return float(np.abs(shares - shares.mean(0)).sum(1).mean() / 2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=8, max_size=60),
    st.lists(st.integers(0, 6), min_size=0, max_size=30),
    st.integers(1, 8),
    st.floats(1e-300, 1e300),
    st.integers(-(2**63), 2**63 - 1),
)
def test_parts_are_disjoint_and_of_equal_size(labels, test_labels, clients, alpha, seed):
    train, test = dirichlet(np.array(labels), np.array(test_labels, np.int64), clients, alpha, seed)
    for parts, whole in ((train, labels), (test, test_labels)):
        assert [len(part) for part in parts] == [len(whole) // clients] * clients
        rows = np.concatenate(parts).tolist()
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < len(whole) for row in rows)


def test_all_examples_are_dealt_if_the_clients_divide_them_evenly():
    train, test = dirichlet(LABELS, TEST_LABELS, 20, 1.0, 0)
    assert sorted(np.concatenate(train)) == list(range(1000))
    assert sorted(np.concatenate(test)) == list(range(200))


def test_heterogeneity_falls_with_alpha_down_to_single_classes():
    spread = [
        np.mean([heterogeneity(dirichlet(LABELS, TEST_LABELS, 20, alpha, seed)[0], LABELS) for seed in range(3)])
        for alpha in (1e-5, 0.1, 1.0, 10.0, 1e4)
    ]
    assert spread == sorted(spread, reverse=True)
    # 50 examples drawn evenly from ten classes still differ by chance.
    assert spread[-1] < 0.2
    # A client of one class differs by 9/10; where a class runs out, its last client gets two.
    assert spread[0] > 0.8


def test_alpha_is_divided_among_the_classes():
    """With concentration α/10 a class, E Σ q² = (1 + α/10)/(1 + α): 0.55 for α = 1, and not 0.18 as for α a class."""
    labels = np.repeat(np.arange(10), 4_000)
    train, _ = dirichlet(labels, TEST_LABELS, 200, 1.0, 0)
    shares = np.array([np.bincount(labels[part], minlength=10) / len(part) for part in train])
    assert (shares**2).sum(1).mean() == pytest.approx(0.55, abs=0.04)


def test_a_clients_test_set_has_the_classes_of_its_training_set():
    train, test = dirichlet(LABELS, TEST_LABELS, 10, 0.5, 1)
    overlap = [np.isin(TEST_LABELS[b], LABELS[a]).mean() for a, b in zip(train, test, strict=True)]
    assert np.mean(overlap) > 0.9


def test_the_seed_determines_the_partition():
    first, again, other = (dirichlet(LABELS, TEST_LABELS, 20, 1.0, seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first[0] + first[1], again[0] + again[1], strict=True))
    assert fingerprint(first[0]) != fingerprint(other[0])


def test_a_seeds_partition_never_changes():
    train, test = dirichlet(LABELS, TEST_LABELS, 20, 1.0, 0)
    assert (fingerprint(train), fingerprint(test)) == ("5621f295679b6385", "72261dd56148da15")


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(SettingError, match="alpha"):
        dirichlet(LABELS, TEST_LABELS, 10, alpha, 0)


def test_the_number_of_clients_must_fit():
    with pytest.raises(SettingError, match="clients must be at least 1, got 0"):
        dirichlet(LABELS, TEST_LABELS, 0, 1.0, 0)
    with pytest.raises(DataError, match="1001 clients cannot share 1000"):
        dirichlet(LABELS, TEST_LABELS, 1001, 1.0, 0)


# ---------------------------------------------------------------------- the other partitions


def cifar100_labels() -> tuple[np.ndarray, ...]:
    fine, test_fine = np.arange(2000) % 100, np.arange(500) % 100
    return fine, fine // 5, test_fine, test_fine // 5


def test_pachinko_gives_equal_disjoint_hands_that_favour_few_coarse_labels() -> None:
    fine, coarse, test_fine, test_coarse = cifar100_labels()
    train, test = partition.pachinko(fine, coarse, test_fine, test_coarse, clients=20, seed=0)
    assert sorted(np.concatenate(train).tolist()) == list(range(2000))
    assert sorted(np.concatenate(test).tolist()) == list(range(500))
    assert {len(hand) for hand in train} == {100}
    # The first client meets full pools, so its hand shows its preferences: few coarse labels, spread within them.
    shares = np.sort(np.bincount(coarse[train[0]], minlength=20))[::-1] / 100
    assert shares[:4].sum() > 0.6
    tests = np.bincount(test_coarse[test[0]], minlength=20) / 25
    trains = np.bincount(coarse[train[0]], minlength=20) / 100
    assert np.abs(tests - trains).sum() < 0.7, "test examples follow the same preferences"


def test_pachinko_works_with_a_tiny_beta_and_refuses_impossible_ones() -> None:
    fine, coarse, test_fine, test_coarse = cifar100_labels()
    train, _ = partition.pachinko(fine, coarse, test_fine, test_coarse, 20, seed=0, beta=1e-12)
    assert len(np.unique(np.concatenate(train))) == sum(map(len, train))
    for wrong in ({"alpha": np.inf}, {"beta": np.inf}, {"beta": 0.0}, {"alpha": -1.0}):
        with pytest.raises(SettingError, match="alpha and beta must be above 0 and finite"):
            partition.pachinko(fine, coarse, test_fine, test_coarse, 20, seed=0, **wrong)


def test_pachinko_with_even_preferences_is_even() -> None:
    fine, coarse, test_fine, test_coarse = cifar100_labels()
    train, _ = partition.pachinko(fine, coarse, test_fine, test_coarse, 20, seed=0, alpha=1e4, beta=1e4)
    assert np.bincount(coarse[train[0]], minlength=20).max() <= 15


def test_by_writer_gives_every_writer_its_own_examples() -> None:
    writers = np.array(["b", "a", "b", "c", "a", "b", "a", "b", "b", "b", "b", "b", "b"])
    train, test = partition.by_writer(writers, seed=0, test_fraction=0.2)
    assert [set(writers[np.concatenate([a, b])]) for a, b in zip(train, test, strict=True)] == [{"a"}, {"b"}]
    assert [len(part) for part in test] == [1, 2], "writer c has one example and is left out"
    assert not set(train[1]) & set(test[1])


def test_single_class_users_have_one_class_and_share_it_equally() -> None:
    labels, tests = np.arange(1000) % 10, np.arange(200) % 10
    train, test = partition.single_class(labels, tests, clients=100, seed=0)
    for user, (rows, held) in enumerate(zip(train, test, strict=True)):
        assert set(labels[rows]) == set(tests[held]) == {user % 10}
        assert (len(rows), len(held)) == (10, 2)
    assert sorted(np.concatenate(train).tolist()) == list(range(1000))


def test_the_librarys_fingerprint_is_the_one_pinned_here() -> None:
    train, test = dirichlet(LABELS, TEST_LABELS, 20, 1.0, 0)
    assert federated.fingerprint(train) == "5621f295679b6385"
    assert federated.fingerprint([*train, *test]) == fingerprint([*train, *test])
    data = fedprior.task("mnist-mini", clients=50, seed=3).data
    parts = [shards[s].tolist() for shards in (data.train, data.test) for s in range(50)]
    assert data.fingerprint() == fingerprint(parts)


def test_partitions_are_pinned() -> None:
    """A seed names the same partition for ever."""
    labels, tests = np.arange(1000) % 10, np.arange(200) % 10
    made = {
        "264069870d26ed39": partition.pachinko(*cifar100_labels(), clients=20, seed=3),
        "3470a81079caa67b": partition.by_writer(np.arange(300) % 7, seed=3),
        "ebb437ffdcd5682f": partition.single_class(labels, tests, 20, seed=3),
    }
    for expected, (train, test) in made.items():
        assert fingerprint([*train, *test]) == expected


@pytest.mark.parametrize("clients", [0, -1, 5000])
def test_impossible_numbers_of_clients_are_refused(clients: int) -> None:
    labels, tests = np.arange(1000) % 10, np.arange(200) % 10
    with pytest.raises((SettingError, DataError), match="clients"):
        partition.single_class(labels, tests, clients, seed=0)
    with pytest.raises((SettingError, DataError), match="clients"):
        partition.pachinko(*cifar100_labels(), clients=clients, seed=0)


def test_single_class_needs_a_multiple_of_the_classes() -> None:
    with pytest.raises(SettingError, match="multiple"):
        partition.single_class(np.arange(100) % 10, np.arange(20) % 10, 15, seed=0)


def naive_deal(labels, preferences, size, random):
    """One draw at a time, everything computed anew: what `_deal` must equal, draw for draw."""
    pools = [list(random.permutation(np.flatnonzero(labels == c))) for c in range(preferences.shape[1])]
    hands = []
    for preference in preferences:
        hand = []
        for _ in range(size):
            left = np.array([len(pool) > 0 for pool in pools])
            weight = preference * left
            if weight.sum() == 0:
                weight = preference = np.eye(len(pools))[random.choice(np.flatnonzero(left))]
            c = int(np.searchsorted(np.cumsum(weight), random.random_sample() * weight.sum(), side="right"))
            hand.append(pools[min(c, np.flatnonzero(weight)[-1])].pop())
        hands.append(np.array(hand, np.int64))
    return hands


@pytest.mark.parametrize("alpha", [0.01, 0.3, 10.0])
def test_dealing_equals_the_naive_twin(alpha):
    labels = np.random.RandomState(0).randint(7, size=300)
    preferences = np.random.RandomState(1).dirichlet(np.full(7, alpha / 7), 30)
    one, other = (deal(labels, preferences, 10, np.random.RandomState(2)) for deal in (partition._deal, naive_deal))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_pachinko_draws_a_dirichlet_a_client_and_family():
    """The frozen stream: gamma draws in one call are the Dirichlet draws of one client after another."""
    families, beta = [2, 3, 1], 10.0
    one, other = np.random.RandomState(5), np.random.RandomState(5)
    naive = np.array([np.concatenate([one.dirichlet(np.full(n, beta)) for n in families]) for _ in range(9)])
    drawn = other.standard_gamma(beta, (9, 6))
    pieces = np.split(drawn, np.cumsum(families)[:-1], axis=1)
    assert np.array_equal(naive, np.concatenate([p * (1 / p.cumsum(1)[:, -1:]) for p in pieces], axis=1))
    assert one.random_sample() == other.random_sample()
