"""A fifth of the clients is hostile: the median stands where the mean falls.

Cohorts of 15, because the median breaks down where half of a cohort is hostile, which one of 10 often meets by chance;
clients that are alike, because the median of unlike clients is biased and takes longer to recover; rounds until flat.
"""

import pytest

import fedprior
from fedprior.errors import DivergedError

ROUNDS, COHORT = 16, 15


def accuracy(name: str, attack: str) -> float:
    """Global accuracy on mnist-mini; a run whose weights overflow has learned nothing."""
    task = fedprior.task("mnist-mini", alpha=100.0)
    chosen = fedprior.algorithm(name, task.network, local_optimiser="SGD(lr=0.1)")
    hostile = {} if attack == "none" else {"attack": attack, "attackers": 0.2}
    try:
        result = fedprior.run(task, chosen, rounds=ROUNDS, evaluate_every=ROUNDS, clients_per_round=COHORT, **hostile)
    except DivergedError:
        return 0.0
    return float(result.summary["global_accuracy"])


@pytest.fixture(scope="module")
def clean() -> dict[str, float]:
    return {name: accuracy(name, "none") for name in ("fedavg", "fedmedian")}


def test_both_learn_among_friends(clean: dict[str, float]) -> None:
    assert min(clean.values()) > 0.85


@pytest.mark.parametrize("attack", ["sign-flip", "scale", "constant"])
def test_the_median_stands_where_the_mean_collapses(attack: str, clean: dict[str, float]) -> None:
    assert accuracy("fedmedian", attack) > clean["fedmedian"] - 0.03
    assert accuracy("fedavg", attack) < clean["fedavg"] - 0.3
