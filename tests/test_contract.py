"""What every algorithm must do: one contract, run for each name."""

import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest
import torch

import fedprior
import own_prior
from fedprior import wire
from fedprior.catalogue.models import CharRNN, Transformer
from fedprior.catalogue.tasks import Task
from fedprior.core import keys, trees
from fedprior.core.errors import FedpriorWarning
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.stacked.together import Together
from fedprior.priors import Prior
from small_world import PlainNet

NAMES = [*fedprior.ALGORITHMS, *own_prior.ENTRIES]
# On a frozen network with adapters, where the units are components of rank one.
ADAPTED = {
    "fedprox, adapters": {"products": True},
    "fedsparse, adapters": {"server_threshold_optimiser": "Adamax(lr=0.1)", "lambda0": 1e-4, "precision": 0.1},
    "fedsparse-sized, adapters": {"sparsity": 0.5, "closing": 0.03},
}
# On texts, where the units are heads and neurons. Recurrent layers have no gates; what reads them has.
ATTENTIVE: dict[str, dict[str, object]] = {
    "fedavg, transformer": {},
    "fedsparse, transformer": {"server_threshold_optimiser": "Adamax(lr=0.1)", "lambda0": 1e-3, "precision": 0.1},
    "fedsparse-sized, transformer": {"sparsity": 0.4, "linear_rate": 0.4, "closing": 0.03},
    "fednarrow, transformer": {"sparsity": 0.4, "dense_rounds": 1, "shrink": 0.3, "linear_rate": 0.5, "average": True},
    "fednarrow+scaffold, transformer": {"sparsity": 0.4},
    "feddrop, transformer": {"linear_rate": 0.4},
    "fedl1, transformer": {"strength": 0.5},
}
RECURRENT: dict[str, dict[str, object]] = {
    "fedavg, recurrent": {},
    "fedsparse, recurrent": {"server_threshold_optimiser": "Adamax(lr=0.1)", "lambda0": 1e-3},
    "fednarrow, recurrent": {"sparsity": 0.05},
    "fedl1, recurrent": {"strength": 0.5},
    "scaffold, recurrent": {},
}
BOTH = [*NAMES, *ADAPTED, *ATTENTIVE]
EVERY = [*BOTH, *RECURRENT]
# Settings that make each algorithm's own mechanism act within a few rounds of this small task.
LIVELY = {
    "fedsparse": {"server_threshold_optimiser": "Adamax(lr=0.1)", "lambda0": 1e-3, "precision": 0.1},
    "fedsparse-unstructured": {"server_threshold_optimiser": "Adamax(lr=0.1)", "lambda0": 1e-3},
    "fedsparse+scaffold": {"server_threshold_optimiser": "Adamax(lr=0.1)", "lambda0": 1e-3},
    "fedsparse-sized": {"sparsity": 0.5, "linear_rate": 0.4, "closing": 0.03},
    "fedtopk": {"top_k": 0.1},
    "fedpm": {"cross_entropy": 1e-3},
    "fednarrow": {
        **{"sparsity": 0.5, "precision": 0.1, "dense_rounds": 1, "shrink": 0.3},
        **{"linear_rate": 0.5, "average": True},
    },
    "fednarrow-unstructured": {"sparsity": 0.5, "dense_rounds": 0, "shrink": 0.3},
    "fednarrow+scaffold": {"sparsity": 0.5, "linear_rate": 0.5},
    "feddrop": {"input_rate": 0.4, "linear_rate": 0.4, "noise": True},
    "fedl1": {"strength": 0.5},
    "fedmedian": {"precision": 0.5},
}


def make_task(name: str = "", dtype: torch.dtype = torch.float64) -> Task:
    generator = torch.Generator().manual_seed(5)
    clients = []
    settings = {"rounds": 5, "batch_size": 4, "epochs": 2, "clients_per_round": 3, "evaluate_every": 1}
    if name in (*ATTENTIVE, *RECURRENT):
        texts = [torch.randint(7, (size, 5), generator=generator) for size in (9, 13, 21, 7, 16)]
        torch.manual_seed(0)
        text_model = Transformer(7, 5, 8, 4, 1, 12) if name in ATTENTIVE else CharRNN(7, 6, layers=1)
        pairs = [(x[:-4], x[:-4].roll(1, 1), x[-4:], x[-4:].roll(1, 1)) for x in texts]
        return fedprior.own_task(text_model.to(dtype), pairs, **settings)
    for size in (5, 9, 17, 3, 12):
        x = torch.randn(size + 4, 1, 8, 8, generator=generator).to(dtype)
        y = (x.mean((1, 2, 3)) * 12).long().clamp(-1, 1) + 1
        clients.append((x[:size], y[:size], x[size:], y[size:]))
    torch.manual_seed(0)
    model = PlainNet().to(dtype)
    model = fedprior.adapt(model, 6, train="out") if name in ADAPTED else model
    return fedprior.own_task(model, clients, classes=3, **settings)


def algorithm(name: str, task: Task, **changes: object) -> fedprior.Algorithm:
    settings = {**LIVELY.get(name, {}), **(ADAPTED | ATTENTIVE | RECURRENT).get(name, {}), **changes}
    return fedprior.algorithm(name.partition(",")[0], task.network, **settings)


def quick(name: str, task: Task) -> fedprior.Algorithm:
    """Its default settings, but a step long enough to learn something in a few rounds."""
    return fedprior.algorithm(name, task.network, local_optimiser="SGD(lr=0.2)")


def simulate(name: str, **settings: object) -> Simulation:
    task = make_task(name)
    return build(algorithm(name, task), task.network, task.data, Settings(**{**task.defaults, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_same_interface(name: str) -> None:
    """Every prior implements `Prior` and adds no argument of its own to it."""
    prior = algorithm(name, make_task()).prior
    for method, function in inspect.getmembers(Prior, inspect.isfunction):
        if not method.startswith("_"):
            assert list(inspect.signature(getattr(type(prior), method)).parameters) == list(
                inspect.signature(function).parameters
            ), method


@pytest.mark.parametrize("name", own_prior.ENTRIES)
def test_a_prior_that_is_not_in_the_library_needs_three_methods_and_thirty_lines(name: str) -> None:
    prior = type(algorithm(name, make_task()).prior)
    methods = [name for name, value in vars(prior).items() if inspect.isfunction(value) and not name.startswith("__")]
    assert len(methods) <= 3
    assert len(own_prior.SOURCES[name].splitlines()) <= 30


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_by_key(name: str) -> None:
    first, second, other = simulate(name), simulate(name), simulate(name, seed=1)
    torch.manual_seed(123)  # the global generator has no say
    records = [[sim.step(evaluate=True) for _ in range(2)] for sim in (first, second, other)]
    assert records[0] == records[1]
    assert records[0] != records[2]


@pytest.mark.parametrize("schedule", [{"epochs": 2}, {"local_steps": 7}], ids=["epochs", "steps"])
@pytest.mark.parametrize("name", BOTH)
def test_vectorised_equals_in_turn(name: str, schedule: dict[str, int]) -> None:
    """Four rounds, clients of unequal sizes, so with padding and clients that stop early."""
    together, in_turn = simulate(name, **schedule), simulate(name, **schedule)
    engine = Together([together])
    for _ in range(4):
        (a,), b = engine.step(evaluate=True), in_turn.step(evaluate=True)
        assert isinstance(a, dict)
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == (b[key] if isinstance(value, (list, int)) else pytest.approx(b[key], abs=1e-9, nan_ok=True))
    found, expected = dict(trees.leaves(together.server)), dict(trees.leaves(in_turn.server))
    for path, value in expected.items():
        torch.testing.assert_close(found[path], value, rtol=0, atol=1e-9)


SWEPT = {
    "fedsparse": {"lambda0": 1e-4, "temperature": 2e-3},
    "fednarrow": {"sparsity": 0.3, "shrink": 0.5, "conv_rate": 0.2, "linear_rate": 0.3},
    "fedsparse-sized": {"sparsity": 0.3, "linear_rate": 0.2, "precision": 0.2, "cross_entropy": 1e-3},
    "fedpm": {"cross_entropy": 1e-2, "pseudo_votes": 2.0},
    "fedprox": {"precision": 0.7},
    "fedl1": {"strength": 0.2},
    own_prior.NAME: {"scale": 0.3, "precision": 0.02},
    own_prior.TREND: {"share": 0.1, "precision": 0.02},
}


@pytest.mark.parametrize("name", NAMES)
def test_runs_trained_together_are_as_if_alone(name: str) -> None:
    """Three runs that differ in seed, initial weights and, where there are any, settings of the prior."""

    def runs() -> list[Simulation]:
        made = []
        for seed, changes in ((0, {}), (1, {}), (2, SWEPT.get(name, {}))):
            task = make_task()
            torch.manual_seed(seed)
            task = dataclasses.replace(task, network=fedprior.Network(PlainNet().double(), task.network.example))
            chosen = algorithm(name, task, **changes)
            made.append(build(chosen, task.network, task.data, Settings(**{**task.defaults, "seed": seed})))
        return made

    together, alone = runs(), runs()
    shared = together[0].data
    for sim in together:
        sim.data = shared
    engine = Together(together)
    for _ in range(3):
        for found, sim in zip(engine.step(evaluate=True), alone, strict=True):
            expected = sim.step(evaluate=True)
            assert isinstance(found, dict)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert found[key] == (value if isinstance(value, (list, int)) else pytest.approx(value, abs=1e-6))
    engine.sync()
    for sim, other in zip(together, alone, strict=True):
        found, expected = dict(trees.leaves(sim.server)), dict(trees.leaves(other.server))
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            torch.testing.assert_close(found[path], value, rtol=0, atol=1e-6)
        if other.optimiser is not None and sim.optimiser is not None:
            moments = dict(trees.leaves(other.optimiser.state()))
            for path, value in trees.leaves(sim.optimiser.state()):
                torch.testing.assert_close(value, moments[path], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_messages_survive_the_wire_exactly_and_have_the_counted_length(name: str) -> None:
    sim = simulate(name)
    sent: list[bytes] = []
    original = wire.encode

    def spy(message: trees.Tree, layout: wire.Layout, number: int = 0) -> bytes:
        data = original(message, layout, number)
        decoded = wire.decode(data, layout, number)
        for section, values in decoded.items():
            for key, value in values.items():
                mask = torch.ones(())
                chosen = layout.sections.get(section)
                if chosen is not None and chosen.mask is not None:
                    mask = chosen.mask(decoded.get("gates", {})).get(key, mask) > 0
                torch.testing.assert_close(value, message[section][key] * mask, rtol=0, atol=0)
        assert wire.message_bytes(message, layout) == len(data)
        sent.append(data)
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "encode", spy)
        record = sim.step(evaluate=False)
    up = sent[-3:]
    down = sent[:-3] * (1 if sim.algorithm.prior.per_client else 3)
    assert record["bytes_up"] == sum(len(data) for data in up)
    assert record["bytes_down"] == sum(len(data) for data in down)


@pytest.mark.parametrize("name", NAMES)
def test_only_counting_gives_the_same_run(name: str) -> None:
    encoded, counted = simulate(name), simulate(name, messages="count")
    for _ in range(3):
        assert encoded.step(evaluate=True) == counted.step(evaluate=True)


class Stopped(Exception):
    """Raised by a progress callback to break a run off."""


@pytest.mark.filterwarnings("ignore:recurrent layers have no gates:fedprior.core.errors.FedpriorWarning")
@pytest.mark.parametrize("name", EVERY)
def test_resume_is_exact(name: str, tmp_path: Path) -> None:
    def stop(record: dict[str, object]) -> None:
        if record["round"] == 3:
            raise Stopped

    task = make_task(name)
    whole = fedprior.run(task, algorithm(name, task), out=tmp_path / "whole", checkpoint_every=2)
    task = make_task(name)
    with pytest.raises(Stopped):
        fedprior.run(task, algorithm(name, task), out=tmp_path / "broken", checkpoint_every=2, progress=stop)
    task = make_task(name)
    resumed = fedprior.resume(tmp_path / "broken", task=task)
    assert resumed.records == whole.records
    for file in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_learns(name: str) -> None:
    """The training loss falls: gradients, M-step and wire point the same way."""
    task = make_task()
    chosen = quick(name, task)
    sim = build(chosen, task.network, task.data, Settings(batch_size=4, clients_per_round=5))
    losses = [sim.step(evaluate=False)["train_loss"] for _ in range(15)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_the_contracts_settings_close_gates() -> None:
    """Otherwise the contract would only be checked on dense models."""
    for name in (
        "fedsparse",
        "fedsparse-unstructured",
        "fedsparse+scaffold",
        "feddrop",
        "fedl1",
        "fedmedian",
        "fedtopk",
    ):
        sim = simulate(name)
        records = [sim.step(evaluate=True) for _ in range(5)]
        full = 3 * (wire.HEADER_BYTES + 8 * trees.count(sim.network.params()))
        full *= 2 if "scaffold" in name else 1
        assert min(r["bytes_up"] for r in records) < 0.95 * full, name


@pytest.mark.parametrize("name", [name for name in ATTENTIVE if not name.startswith("fedavg")])
def test_the_contracts_settings_close_gates_of_texts_too(name: str) -> None:
    """Messages are shorter than FedAvg's, or SCAFFOLD's where it composes."""
    sim = simulate(name)
    records = [sim.step(evaluate=False) for _ in range(5)]
    dense = 3 * (wire.HEADER_BYTES + 8 * trees.count(sim.network.params())) * (2 if "scaffold" in name else 1)
    smallest = min(record["bytes_up"] for record in records)
    assert smallest < 0.9 * dense


@pytest.mark.parametrize("algorithm", ["fedsparse", "fedl1", "feddrop"])
def test_a_user_is_told_that_recurrent_layers_have_no_gates(algorithm: str) -> None:
    with pytest.warns(FedpriorWarning, match=r"recurrent layers have no gates.*rnn \(LSTM\)"):
        fedprior.run(make_task("fedavg, recurrent"), algorithm, rounds=1)


def test_keys_are_not_shared_between_purposes() -> None:
    root = keys.key(0)
    streams = [keys.bits(keys.fold(root, purpose), 4).tolist() for purpose in keys.Purpose]
    assert all(a != b for a, b in itertools.combinations(streams, 2))
