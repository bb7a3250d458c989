"""Whole rounds on the kernels against rounds with clients in turn on a CPU, which use none of them."""

import pytest
import torch

import fedprior
from fedprior.core import trees

# They have tests of their own, and are slow to interpret. On a GPU they are the kernels'.
CONVOLUTIONS_ARE_TORCHS = True

# Gates are drawn by comparing numbers, so tolerances could be met or missed by one gate: these seeds are far from that.
# The server takes plain steps: Adam's first ones are as long as its rate whatever the gradient, so that where it should
# be zero the last bit decides (a change of 3e-7 in the initial weights moves some by 1e-3 in three rounds).
PLAIN = {"temperature": 0.05, "server_optimiser": "SGD(lr=1.0)"}
CASES = {
    "fedavg with dropout": ("fedavg", {}, {"dropout": 0.3}, {}),
    "even clients, full batches": ("fedavg", {}, {"sizes": (8, 8, 8, 8)}, {}),
    "fedsparse": ("fedsparse", {"lambda0": 1e-3, **PLAIN}, {"sizes": (8, 8, 8, 8)}, {"epochs": 2}),
    "dense rounds": ("fedsparse", {"dense_rounds": 1, **PLAIN}, {"dropout": 0.3}, {}),
}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy, which warns of it
@pytest.mark.parametrize("case", CASES)
def test_rounds_on_kernels_equal_rounds_in_turn(small_task, case, on_kernels, monkeypatch):
    name, own, task, settings = CASES[case]
    # On a GPU the first round runs without a graph, the second is captured and the third replays it.
    settings = {"rounds": 3 if on_kernels["device"] == "cuda" else 2, "clients_per_round": 2, **settings}
    fast = fedprior.run(
        (built := small_task(**task)), fedprior.algorithm(name, built.network, **own), **settings, **on_kernels
    )
    monkeypatch.undo()
    slow = fedprior.run(
        (built := small_task(**task)), fedprior.algorithm(name, built.network, **own), **settings, mode="in-turn"
    )
    for found, expected in zip(fast.records, slow.records, strict=True):
        assert found.pop("floored", None) == expected.pop("floored", None)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True)
    theirs = dict(trees.leaves(slow.simulation.server))
    for path, value in trees.leaves(fast.simulation.server):
        torch.testing.assert_close(value.cpu(), theirs[path], rtol=1e-3, atol=1e-4, msg=path)
