"""Rounds without thresholds are rounds of the algorithm without gates, weight for weight."""

import pytest
import torch

import fedprior
from fedprior.core import trees

SERVER = "Adam(lr=0.01)"
CASES = {
    "units": ("fedsparse", {}),
    "soft": ("fedsparse", {"temperature": 1.0}),
    "unpruned": ("fedsparse", {"prune_server": False}),
    "inputs": ("fedsparse", {"linear_gates": "inputs", "gate_output": True}),
    "weights": ("fedsparse-unstructured", {}),
    "decay": ("fedsparse", {"server_threshold_optimiser": "AdamW(lr=0.1)"}),
    "closed form": ("fedsparse", {"server_optimiser": "none"}),
}


class Broken(BaseException):
    """Stands for the end of the process."""


def sparse(task, case, dense):
    name, settings = CASES[case]
    settings = {"server_optimiser": SERVER, "lambda0": 1e-3, **settings}
    return fedprior.algorithm(name, task.network, dense_rounds=dense, **settings)


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
@pytest.mark.parametrize("case", CASES)
def test_dense_rounds_are_those_of_the_algorithm_without_gates(small_task, case, mode):
    task = small_task(dtype=torch.float64)
    closed = CASES[case][1].get("server_optimiser") == "none"
    plain = fedprior.algorithm("fedavg", task.network, server_optimiser="none" if closed else SERVER)
    settings = {"rounds": 3, "epochs": 2, "mode": mode, "evaluate_every": 1}
    dense = fedprior.run(task, sparse(task, case, 3), **settings)
    expected = fedprior.run(task, plain, **settings)
    for name, value in expected.simulation.server["weights"].items():
        torch.testing.assert_close(dense.simulation.server["weights"][name], value, rtol=0, atol=1e-9)
    assert [r["train_loss"] for r in dense.records] == pytest.approx([r["train_loss"] for r in expected.records])
    assert all(record["tv_max"] == record["sparsity"] == 0 for record in dense.records)


@pytest.mark.parametrize("case", CASES)
def test_after_dense_rounds_gates_start_as_usual(small_task, case):
    task = small_task(dtype=torch.float64)
    algorithm = sparse(task, case, 2)
    prior = algorithm.prior
    result = fedprior.run(task, algorithm, rounds=2, epochs=2)
    next_round = prior.prune(result.simulation.server)
    again = prior.init(result.simulation.server["weights"])
    thresholds = type(prior).init(prior.__class__(**{**vars(prior), "dense_rounds": 0}), again["weights"])["thresholds"]
    for layer, value in thresholds.items():
        torch.testing.assert_close(next_round["thresholds"][layer], value)
    assert float(next_round["age"]["rounds"]) == 3


def test_thresholds_work_once_the_dense_rounds_are_over(small_task):
    task = small_task()
    result = fedprior.run(task, sparse(task, "units", 2), rounds=12, epochs=3, evaluate_every=1)
    sparsity = [record["sparsity"] for record in result.records]
    assert sparsity[:2] == [0, 0]
    # How many is for `test_paper.py` to say; that there are any shows that thresholds are there.
    assert sparsity[-1] > 0


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_a_run_stopped_during_or_after_dense_rounds_continues(small_task, tmp_path, mode, stop):
    def halt(record):
        if record["round"] == stop:
            raise Broken

    task = small_task()
    settings = {"rounds": 5, "epochs": 2, "mode": mode, "evaluate_every": 1, "checkpoint_every": 1}
    whole = fedprior.run(task, sparse(task, "units", 2), **settings)
    with pytest.raises(Broken):
        fedprior.run(task, sparse(task, "units", 2), out=tmp_path / "run", progress=halt, **settings)
    resumed = fedprior.resume(tmp_path / "run", task=task, algorithm=sparse(task, "units", 2))
    assert resumed.records == whole.records
    found = dict(trees.leaves(resumed.simulation.server))
    for path, value in trees.leaves(whole.simulation.server):
        assert torch.equal(value, found[path]), path


def test_negative_dense_rounds_are_refused(small_task):
    with pytest.raises(fedprior.SettingError, match="dense_rounds must be at least 0"):
        fedprior.algorithm("fedsparse", small_task().network, dense_rounds=-1)
