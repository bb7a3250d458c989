"""A fifth of the clients is hostile: the median and the Student-t stand where the mean falls.

Cohorts of 15, because the median breaks down where half of a cohort is hostile, which one of 10 often meets by chance;
clients that are alike, because the median of unlike clients is biased and takes longer to recover; rounds until flat.
A small network, because the attack does not ask for the architecture; clients trained together, which is a quarter of
the time and, as `engines/test_together.py` holds, the same numbers.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedprior
from fedprior.core.errors import DivergedError
from fedprior.core.network import Network

SETTINGS = {
    "rounds": 16,
    "evaluate_every": 16,
    "clients_per_round": 15,
    "mode": "vectorised",
    "device": "cpu",
    "bound": 0.0,
}


def digits() -> fedprior.Task:
    """The clients of mnist-mini with one hidden layer."""
    task = fedprior.task("mnist-mini", alpha=100.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    return replace(task, network=Network(module, task.data.x[0]))


def accuracy(name: str, attack: str) -> float:
    """Global accuracy; a run whose weights overflow has learned nothing."""
    task = digits()
    chosen = fedprior.algorithm(name, task.network, local_optimiser="SGD(lr=0.1)")
    hostile = {} if attack == "none" else {"attack": attack, "attackers": 0.2}
    try:
        result = fedprior.run(task, chosen, **SETTINGS, **hostile)
    except DivergedError:
        return 0.0
    return float(result.summary["global_accuracy"])


@pytest.fixture(scope="module")
def clean() -> dict[str, float]:
    return {name: accuracy(name, "none") for name in ("fedavg", "fedmedian", "fedstudent")}


def test_both_learn_without_attackers(clean: dict[str, float]) -> None:
    assert min(clean.values()) > 0.85


@pytest.mark.filterwarnings("ignore:the loss jumped")  # the mean's does
@pytest.mark.parametrize("attack", ["sign-flip", "scale", "constant"])
def test_the_median_withstands_an_attack_that_breaks_the_mean(attack: str, clean: dict[str, float]) -> None:
    assert accuracy("fedmedian", attack) > clean["fedmedian"] - 0.03
    assert accuracy("fedavg", attack) < clean["fedavg"] - 0.3


@pytest.mark.parametrize("attack", ["sign-flip", "scale", "constant", "backdoor"])
def test_the_student_withstands_every_attack(attack: str, clean: dict[str, float]) -> None:
    assert accuracy("fedstudent", attack) > clean["fedstudent"] - 0.02
