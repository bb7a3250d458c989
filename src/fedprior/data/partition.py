"""Divide a labelled set among clients.

Draws come from numpy's legacy RandomState, whose stream is frozen, so that a seed names the same partition for ever.
"""

import numpy as np

from fedprior.errors import DataError, SettingError


def dirichlet(
    labels: np.ndarray, test_labels: np.ndarray, clients: int, alpha: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Hsu, Qi and Brown (2019): client s draws q_s ~ Dir(α·p), p uniform over classes, then its examples from q_s.

    Every client gets the same number of training examples, and of test examples from the same q_s, without replacement;
    a class that runs out leaves the draw. Note that α is divided among the classes.
    """
    if not 0 < alpha < np.inf:
        raise SettingError(f"alpha must be above 0 and finite, got {alpha}")
    if clients < 1:
        raise SettingError(f"clients must be at least 1, got {clients}")
    if clients > len(labels):
        raise DataError(f"{clients} clients cannot share {len(labels)} training examples: some would have none")
    random = _random_state(seed)
    classes = int(np.concatenate([labels, test_labels]).max()) + 1
    preferences = _preferences(random, alpha, classes, clients)
    return (
        _deal(labels, preferences, len(labels) // clients, random),
        _deal(test_labels, preferences, len(test_labels) // clients, random),
    )


def _random_state(seed: int) -> np.random.RandomState:
    """The legacy generator takes 32 bits; seeds beyond them are given as two words."""
    return np.random.RandomState(seed if 0 <= seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])


def _preferences(random: np.random.RandomState, alpha: float, classes: int, clients: int) -> np.ndarray:
    """One q_s a client. For a tiny α numpy's draw underflows to 0/0; there the Dirichlet's limit is a single class."""
    drawn = random.dirichlet(np.full(classes, alpha / classes), clients)
    lost = np.isnan(drawn).any(1)
    drawn[lost] = np.eye(classes)[random.randint(classes, size=lost.sum())]
    return drawn


def _deal(labels: np.ndarray, preferences: np.ndarray, size: int, random: np.random.RandomState) -> list[np.ndarray]:
    """Give each client `size` examples from its preferred classes, as far as they last."""
    pools = [list(random.permutation(np.flatnonzero(labels == c))) for c in range(preferences.shape[1])]
    hands = []
    for preference in preferences:
        hand = []
        for _ in range(size):
            left = np.array([len(pool) > 0 for pool in pools])
            weight = preference * left
            if weight.sum() == 0:
                # A client whose classes are all gone turns to one that is left.
                weight = preference = np.eye(len(pools))[random.choice(np.flatnonzero(left))]
            c = int(np.searchsorted(np.cumsum(weight), random.random_sample() * weight.sum(), side="right"))
            # Rounding may step past the last class that is left.
            hand.append(pools[min(c, np.flatnonzero(weight)[-1])].pop())
        hands.append(np.array(hand, np.int64))
    return hands
