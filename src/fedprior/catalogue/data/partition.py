"""Divide a labelled set among clients.

Draws come from numpy's legacy RandomState, whose stream is frozen, so that a seed always gives the same partition.
"""

from bisect import bisect_right

import numpy as np

from fedprior.core.errors import DataError, SettingError

Parts = tuple[list[np.ndarray], list[np.ndarray]]
"""The rows of every client's training examples, and of its test examples."""


def dirichlet(labels: np.ndarray, test_labels: np.ndarray, clients: int, alpha: float, seed: int) -> Parts:
    """Hsu, Qi and Brown (2019): client s draws q_s ~ Dir(α·p), p uniform over classes, then its examples from q_s.

    Every client gets the same number of training examples and, from the same q_s, of test examples, without
    replacement. A class that runs out leaves the draw. Note that α is divided among the classes.
    """
    if not 0 < alpha < np.inf:
        raise SettingError(f"alpha must be above 0 and finite, got {alpha}")
    _check_clients(clients, len(labels))
    random = _random_state(seed)
    classes = int(np.concatenate([labels, test_labels]).max()) + 1
    preferences = _preferences(random, alpha, classes, clients)
    return (
        _deal(labels, preferences, len(labels) // clients, random),
        _deal(test_labels, preferences, len(test_labels) // clients, random),
    )


def pachinko(
    labels: np.ndarray,
    coarse: np.ndarray,
    test_labels: np.ndarray,
    test_coarse: np.ndarray,
    clients: int,
    seed: int,
    alpha: float = 0.1,
    beta: float = 10.0,
) -> Parts:
    """Reddi et al. (2020): a client prefers some coarse labels, Dir(α), and some fine labels within each, Dir(β).

    As in `dirichlet`, every client gets the same number of examples without replacement, a label that runs out leaves
    the draw, and the test examples follow the same preferences.
    """
    if not 0 < alpha < np.inf or not 0 < beta < np.inf:
        raise SettingError(f"alpha and beta must be above 0 and finite, got {alpha} and {beta}")
    _check_clients(clients, len(labels))
    random = _random_state(seed)
    fine_to_coarse = dict(zip(labels.tolist(), coarse.tolist(), strict=True))
    fine_to_coarse |= dict(zip(test_labels.tolist(), test_coarse.tolist(), strict=True))
    families = [
        sorted(fine for fine, parent in fine_to_coarse.items() if parent == c)
        for c in sorted(set(fine_to_coarse.values()))
    ]
    preferences = np.zeros((clients, max(fine_to_coarse) + 1))
    shares = _preferences(random, alpha * len(families), len(families), clients)
    # A Dirichlet draw is gamma draws divided by their sum, so one call serves all clients and families, in order.
    drawn = random.standard_gamma(beta, (clients, sum(len(family) for family in families)))
    pieces = np.split(drawn, np.cumsum([len(family) for family in families])[:-1], axis=1)
    for share, family, piece in zip(shares.T, families, pieces, strict=True):
        piece[piece.sum(1) == 0] = 1  # for a tiny β the whole draw underflows
        preferences[:, family] = share[:, None] * (piece * (1 / piece.cumsum(1)[:, -1:]))
    return (
        _deal(labels, preferences, len(labels) // clients, random),
        _deal(test_labels, preferences, len(test_labels) // clients, random),
    )


def by_writer(writers: np.ndarray, seed: int, test_fraction: float = 0.1, min_examples: int = 2) -> Parts:
    """One client per writer, in the order of their names. A share of each writer's examples is its test set.

    Writers with fewer than `min_examples` for training are left out.
    """
    if not 0 <= test_fraction < 1:
        raise SettingError(f"test_fraction must be at least 0 and below 1, got {test_fraction}")
    random = _random_state(seed)
    order = np.argsort(writers, kind="stable")
    bounds = np.flatnonzero(writers[order][1:] != writers[order][:-1]) + 1
    train, test = [], []
    for rows in np.split(order, bounds):
        mixed = random.permutation(rows)
        held = round(test_fraction * len(rows)) if len(rows) > min_examples else 0
        if len(rows) - held >= min_examples:
            train.append(np.sort(mixed[held:]))
            test.append(np.sort(mixed[:held]))
    if not train:
        raise DataError(f"no writer has {min_examples} examples")
    return train, test


def single_class(labels: np.ndarray, test_labels: np.ndarray, clients: int, seed: int) -> Parts:
    """Give client s only examples of class s mod C. Clients of the same class share its examples equally."""
    _check_clients(clients, len(labels))
    random = _random_state(seed)
    classes = int(max(labels.max(), test_labels.max())) + 1
    if clients % classes:
        raise SettingError(f"clients must be a multiple of the {classes} classes, got {clients}")
    parts: list[list[np.ndarray]] = []
    for values in (labels, test_labels):
        mixed = [random.permutation(np.flatnonzero(values == c)) for c in range(classes)]
        shares = [np.array_split(rows, clients // classes) for rows in mixed]
        parts.append([shares[s % classes][s // classes] for s in range(clients)])
    return parts[0], parts[1]


def _check_clients(clients: int, examples: int) -> None:
    if clients < 1:
        raise SettingError(f"clients must be at least 1, got {clients}")
    if clients > examples:
        raise DataError(f"{clients} clients cannot share {examples} training examples: some would have none")


def _random_state(seed: int) -> np.random.RandomState:
    """The legacy generator takes 32 bits, so larger seeds become two words."""
    return np.random.RandomState(seed if 0 <= seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])


def _preferences(random: np.random.RandomState, alpha: float, classes: int, clients: int) -> np.ndarray:
    """One q_s per client. For a tiny α numpy's draw underflows to 0/0; there we use the limit, a single class."""
    drawn = random.dirichlet(np.full(classes, alpha / classes), clients)
    lost = np.isnan(drawn).any(1)
    drawn[lost] = np.eye(classes)[random.randint(classes, size=lost.sum())]
    return drawn


def _deal(labels: np.ndarray, preferences: np.ndarray, size: int, random: np.random.RandomState) -> list[np.ndarray]:
    """Give each client `size` examples from its preferred classes, as long as they last."""
    pools = [random.permutation(np.flatnonzero(labels == c)).tolist() for c in range(preferences.shape[1])]
    left = np.array([len(pool) > 0 for pool in pools])
    hands = np.zeros((len(preferences), size), np.int64)
    for preference, hand in zip(preferences, hands, strict=True):
        bounds: list[float] = []
        for place in range(size):
            if not bounds:  # a new client, or a class has just run out: the odds have changed
                weight = preference * left
                if weight.sum() == 0:
                    # A client whose classes have all run out turns to a class that is left.
                    weight = preference = np.eye(len(pools))[random.choice(np.flatnonzero(left))]
                bounds, total, last = np.cumsum(weight).tolist(), float(weight.sum()), int(np.flatnonzero(weight)[-1])
            # Rounding may step past the last class that is left.
            c = min(bisect_right(bounds, random.random_sample() * total), last)
            hand[place] = pools[c].pop()
            if not pools[c]:
                left[c], bounds = False, []
    return list(hands)
