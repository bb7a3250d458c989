"""The Dirichlet partition: who gets what, and that a seed names it for ever."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior import DataError, SettingError
from fedprior.data import dirichlet

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


def test_all_examples_are_dealt_when_the_clients_divide_them():
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


def test_the_seed_names_the_partition():
    first, again, other = (dirichlet(LABELS, TEST_LABELS, 20, 1.0, seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first[0] + first[1], again[0] + again[1], strict=True))
    assert fingerprint(first[0]) != fingerprint(other[0])


def test_the_partition_of_a_seed_is_the_one_it_has_always_been():
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
