"""Runs that train together against the same runs alone, clients in turn: also when some of them fail."""

import dataclasses

import pytest
import torch
from torch import nn

import fedprior
from fedprior.core import trees
from fedprior.core.optimisers import Optimiser
from fedprior.core.settings import Settings
from fedprior.em import Algorithm
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.stacked.together import Together
from fedprior.priors import Gaussian


def simulate(task, algorithm, seed=0, **settings) -> Simulation:
    chosen = {"clients_per_round": 3, "batch_size": 4, "device": "cpu", "seed": seed, **settings}
    return build(algorithm, task.network, task.data, Settings(**chosen))


def same(found: Simulation, expected: Simulation) -> None:
    """The whole state, moments included, up to rounding."""
    for one, other in (
        (found.server, expected.server),
        (found.optimiser.state() if found.optimiser else {}, expected.optimiser.state() if expected.optimiser else {}),
        ({str(k): v for k, v in found.memory.items()}, {str(k): v for k, v in expected.memory.items()}),
    ):
        mine, theirs = dict(trees.leaves(one)), dict(trees.leaves(other))
        assert mine.keys() == theirs.keys()
        for path, value in theirs.items():
            torch.testing.assert_close(mine[path], value, rtol=0, atol=1e-9, check_dtype=False)
    assert found.round == expected.round
    assert torch.allclose(found.accuracy, expected.accuracy, equal_nan=True)


# ---------------------------------------------------------------------- many runs


CASES = {
    "attackers": ("fedavg", {}, {"attack": "sign-flip", "attackers": 0.4}),
    "local steps": ("scaffold", {}, {"local_steps": 5}),
    "mixture": ("fedmix", {"scaffold": True}, {}),
    "median under attack": ("fedmedian", {}, {"attack": "constant", "attackers": 0.3}),
    "backdoor": ("fedgeomedian", {}, {"attack": "backdoor", "attackers": 0.3}),
    "input gates": (
        "fedsparse",
        {"linear_gates": "inputs", "gate_output": True, "lambda0": 1e-3, "local_threshold_optimiser": "Adamax(lr=0.1)"},
        {"epochs": 2},
    ),
    "dense rounds": ("fedsparse", {"dense_rounds": 2, "lambda0": 1e-3}, {"epochs": 2}),
    "narrow": ("fednarrow", {"sparsity": 0.5, "dense_rounds": 1, "shrink": 0.4}, {"epochs": 2}),
    "controls left out": ("scaffold", {}, {"attack": "scale", "attackers": 0.4}),
    "models left out": ("fedmix", {}, {"attack": "scale", "attackers": 0.4}),
    "votes left out": ("fedsparse-sized", {"sparsity": 0.5}, {"attack": "scale", "attackers": 0.4}),
    "gates left out": ("fedsparse", {"lambda0": 1e-3}, {"attack": "scale", "attackers": 0.4, "weighting": "equal"}),
    "unpruned": ("fedsparse", {"prune_server": False, "dense_rounds": 1, "lambda0": 1e-3}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_runs_trained_together_equal_runs_trained_alone(small_task, case):
    """Also the bytes: alone every message is encoded, together they are counted."""
    name, own, settings = CASES[case]
    task = small_task(dtype=torch.float64, test_sizes=(6, 0, 3, 0, 1, 2))
    algorithm = fedprior.algorithm(name, task.network, **own)
    together, alone = ([simulate(task, algorithm, seed, **settings) for seed in (0, 1)] for _ in range(2))
    engine = Together(together)
    for _ in range(4):
        for found, sim in zip(engine.step(evaluate=True), alone, strict=True):
            expected = sim.step(evaluate=True)
            for said in ("floored", "faults"):
                assert found.pop(said, None) == expected.pop(said, None)
            assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
    engine.sync()
    for one, other in zip(together, alone, strict=True):
        same(one, other)


@pytest.mark.parametrize("name", ["fedavg", "fedmix", "fedsparse"])
def test_full_batches_have_no_weights_and_last_ones_may_have(small_task, name):
    """Clients of as many batches, of which only the last has padding: the others are told apart on the host."""
    task = small_task((8, 7, 8, 6), dtype=torch.float64)
    algorithm = fedprior.algorithm(name, task.network)
    together, alone = (simulate(task, algorithm, epochs=2) for _ in range(2))
    engine = Together([together])
    for _ in range(3):
        (found,), expected = engine.step(evaluate=True), alone.step(evaluate=True)
        assert found == pytest.approx(expected, abs=1e-9)
    engine.sync()
    same(together, alone)


def test_targets_that_are_not_labels_have_no_accuracy_in_either_engine():
    draw = torch.Generator().manual_seed(0)
    clients = [tuple(torch.randn(n, d, generator=draw) for n, d in ((5, 3), (5, 2), (2, 3), (2, 2))) for _ in range(4)]

    def squared(outputs, y):
        return (outputs - y).square().sum(-1)

    task = fedprior.own_task(nn.Linear(3, 2), clients, loss=squared)
    algorithm = fedprior.algorithm("fedavg", task.network)
    together, alone = simulate(task, algorithm), simulate(task, algorithm)
    engine = Together([together])
    for _ in range(2):
        (found,), expected = engine.step(evaluate=True), alone.step(evaluate=True)
        assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert together.accuracy.isnan().all()


def test_own_algorithms_and_priors_train_together(small_task):
    class Own(Gaussian):
        scalars = ()

    task = small_task(dtype=torch.float64)
    algorithm = Algorithm(Own(0.3), {"weights": Optimiser("SGD", {"lr": 0.1})})
    together, alone = ([simulate(task, algorithm, seed) for seed in (0, 1)] for _ in range(2))
    engine = Together(together)
    for _ in range(2):
        engine.step(evaluate=False)
        for sim in alone:
            sim.step(evaluate=False)
    for one, other in zip(together, alone, strict=True):
        same(one, other)


# ---------------------------------------------------------------------- runs that diverge


def poison(simulations: list[Simulation], place: int) -> None:
    """From now on one run's weights are not finite after local training: its data stay as they are for the others."""
    simulations[place].server["weights"]["fc2.bias"].fill_(1e308)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_run_that_diverges_does_not_disturb_the_others(small_task, place):
    task = small_task(dtype=torch.float64)
    algorithm = fedprior.algorithm("fedadam", task.network)
    together, alone = ([simulate(task, algorithm, seed) for seed in (0, 1, 2)] for _ in range(2))
    engine = Together(together)
    for number in range(1, 6):
        if number == 3:
            poison(together, place)
            kept = trees.tree_map(torch.clone, together[place].server)
        records = engine.step(evaluate=True)
        for other, (found, sim) in enumerate(zip(records, alone, strict=True)):
            if other == place and number >= 3:
                assert isinstance(found, fedprior.DivergedError)
                assert "in round 3:" in str(found)
                continue
            assert found == pytest.approx(sim.step(evaluate=True), abs=1e-9)
        engine.sync()
    poison(alone, place)  # it was left after round 2, which is the state that must have been kept
    for one, other in zip(together, alone, strict=True):
        same(one, other)
    for (path, value), (_, now) in zip(trees.leaves(kept), trees.leaves(together[place].server), strict=True):
        assert torch.equal(value, now), path


@pytest.mark.parametrize("server", ["Adam(lr=0.01)", "NAdam(lr=0.01)", "SGD(lr=1.0, momentum=0.9)"])
def test_if_all_runs_diverge_moments_are_those_before_the_round(small_task, server):
    task = small_task(dtype=torch.float64)
    algorithm = fedprior.algorithm("fedadam", task.network, server_optimiser=server)
    together, alone = simulate(task, algorithm), simulate(task, algorithm)
    engine = Together([together])
    for _ in range(3):
        engine.step(evaluate=False)
        alone.step(evaluate=False)
    poison([together], 0)
    poison([alone], 0)
    assert isinstance(engine.step(evaluate=False)[0], fedprior.DivergedError)
    with pytest.raises(fedprior.DivergedError):
        alone.step(evaluate=False)
    engine.sync()
    same(together, alone)


# ---------------------------------------------------------------------- what cannot be stacked


def test_runs_that_differ_in_more_than_seed_and_scalars_are_refused(small_task):
    """One case for each thing that a round of all reads off the first run."""
    task = small_task()
    fedavg = fedprior.algorithm("fedavg", task.network)
    first = simulate(task, fedavg)
    Together([first, simulate(task, fedavg, seed=1)])
    prox = (fedprior.algorithm("fedprox", task.network, precision=precision) for precision in (0.1, 0.2))
    Together([simulate(task, algorithm) for algorithm in prox])
    later = simulate(task, fedavg)
    later.step(evaluate=False)
    other_examples = small_task()
    other_examples.data.test_x[-1] += 1
    others = {
        "clients_per_round": simulate(task, fedavg, clients_per_round=2),
        "batch_size": simulate(task, fedavg, batch_size=5),
        "local_steps": simulate(task, fedavg, local_steps=2),
        "weighting": simulate(task, fedavg, weighting="equal"),
        "lr_schedule": simulate(task, fedavg, lr_schedule="cosine"),
        "attack": simulate(task, fedavg, attack="scale", attackers=0.3),
        "arithmetic": simulate(task, fedavg, arithmetic="float32"),
        "wire": simulate(task, fedavg, wire="int8"),
        "data": simulate(task, fedavg, data="host"),
        "algorithm": simulate(task, fedprior.algorithm("fedprox", task.network)),
        "local_optimiser": simulate(task, fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.3)")),
        "examples": simulate(other_examples, fedavg),
        "network": simulate(small_task(dropout=0.5), fedavg),
        "rounds that they have had": later,
    }
    for what, other in others.items():
        with pytest.raises(fedprior.SettingError, match=f"differ in .*{what}.* cannot be stacked") as error:
            Together([first, other])
        assert "\n" not in str(error.value)


def test_stacked_runs_must_share_their_frozen_layers(small_task):
    """Weights are stacked; what is frozen would be the first run's."""
    runs = []
    for value in (1.0, 2.0):
        task = small_task()
        task.network.module.register_buffer("scale", torch.tensor(value))
        runs.append(simulate(task, fedprior.algorithm("fedavg", task.network)))
    runs[1].data = runs[0].data
    with pytest.raises(fedprior.SettingError, match="differ in scale cannot"):
        Together(runs)


def test_stacked_runs_cannot_share_a_server_optimiser_that_is_not_elementwise(small_task):
    task = small_task()
    algorithm = fedprior.algorithm("fedavg", task.network, server_optimiser="Adafactor(lr=0.01)")
    with pytest.raises(fedprior.SettingError, match="in turn"):
        fedprior.run(task, algorithm, mode="vectorised")
    assert dataclasses.replace(algorithm, server=None).vectorises
