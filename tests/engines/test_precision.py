"""Rounded messages in every engine: the same numbers, whatever the algorithm, and training that still learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedprior
from fedprior import wire
from fedprior.catalogue.algorithms import run_settings
from fedprior.core import keys, trees
from fedprior.core.keys import Purpose
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.stacked.together import Together
from fedprior.runs import specs, start
from fedprior.runs.asked import Parts, config_of
from fedprior.runs.folder import RunFolder
from small_world import PlainNet
from test_contract import NAMES, Stopped, algorithm, make_task, quick, simulate

WIDE = {"fedavg": "bfloat16/float16", "fedsparse": "float32/int8", "fedmix": "int8/float32"}
NARROW = [*((name, "int4") for name in NAMES), *((name, "int8/int4") for name in ("fedavg", "fedsparse", "scaffold"))]


def close(found, expected, atol=0.0):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        torch.testing.assert_close(found[path], value, rtol=0, atol=atol)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_counting_and_encoding_give_the_same_run(name, entropy):
    """To the last bit and byte: what is decoded is what was rounded."""
    precisions = "int4" if entropy else WIDE.get(name, "int8/int4")
    encoded = simulate(name, wire=precisions, entropy=entropy)
    counted = simulate(name, wire=precisions, entropy=entropy, messages="count")
    for _ in range(3):
        assert encoded.step(evaluate=True) == counted.step(evaluate=True)
    close(dict(trees.leaves(counted.server)), dict(trees.leaves(encoded.server)))


@pytest.mark.parametrize(("name", "precisions"), [*((name, "int8/int4") for name in NAMES), *WIDE.items()])
def test_vectorised_equals_in_turn(name, precisions):
    together, in_turn = simulate(name, wire=precisions), simulate(name, wire=precisions)
    engine = Together([together])
    for _ in range(3):
        (a,), b = engine.step(evaluate=True), in_turn.step(evaluate=True)
        assert isinstance(a, dict)
        assert a.keys() == b.keys()
        for key, value in a.items():
            exact = isinstance(value, (list, int))
            assert value == (b[key] if exact else pytest.approx(b[key], abs=1e-9, nan_ok=True)), key
    close(dict(trees.leaves(together.server)), dict(trees.leaves(in_turn.server)), atol=1e-9)


def test_runs_with_different_settings_train_together_as_if_alone():
    def make():
        tasks = [make_task() for _ in range(2)]
        chosen = [
            fedprior.algorithm("fedsparse", task.network, server_threshold_optimiser="Adamax(lr=0.1)", lambda0=lambda0)
            for task, lambda0 in zip(tasks, (1e-3, 1e-4), strict=True)
        ]
        return [
            build(one, task.network, task.data, Settings(**{**task.defaults, "seed": seed, "wire": "int4"}))
            for seed, (one, task) in enumerate(zip(chosen, tasks, strict=True))
        ]

    together, alone = make(), make()
    together[1].data = together[0].data
    engine = Together(together)
    for _ in range(4):
        for found, sim in zip(engine.step(evaluate=True), alone, strict=True):
            expected = sim.step(evaluate=True)
            assert [found[f"bytes_{way}"] for way in ("up", "down")] == [
                expected[f"bytes_{way}"] for way in ("up", "down")
            ]
            assert found["sparsity"] == pytest.approx(expected["sparsity"])
    for sim, other in zip(together, alone, strict=True):
        close(dict(trees.leaves(sim.server)), dict(trees.leaves(other.server)), atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedsparse+scaffold", "fedmedian", "feddrop"])
def test_resume_is_exact(name, tmp_path: Path):
    def stop(record):
        if record["round"] == 3:
            raise Stopped

    given = {"checkpoint_every": 2, "wire": "int8/int4"}
    task = make_task()
    whole = fedprior.run(task, algorithm(name, task), out=tmp_path / "whole", **given)
    task = make_task()
    with pytest.raises(Stopped):
        fedprior.run(task, algorithm(name, task), out=tmp_path / "broken", progress=stop, **given)
    resumed = fedprior.resume(tmp_path / "broken", task=make_task())
    assert resumed.records == whole.records
    for file in ("rounds.jsonl", "model.safetensors", "config.toml"):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert 'wire = "int8/int4"' in (tmp_path / "whole" / "config.toml").read_text()


@pytest.mark.parametrize(("name", "precisions"), NARROW)
def test_learns_with_fewer_bytes(name, precisions):
    task = make_task(torch.float32)
    chosen = quick(name, task)
    given = {"batch_size": 4, "clients_per_round": 5}
    # Clients together: the same numbers, as above, in less time.
    sim = Together([build(chosen, task.network, task.data, Settings(wire=precisions, **given))])
    full = build(chosen, task.network, task.data, Settings(**given)).step(evaluate=False)
    records = [sim.step(evaluate=False)[0] for _ in range(15)]
    losses = [record["train_loss"] for record in records]
    assert sum(losses[-3:]) < sum(losses[:3])
    # Units are small here, so scales matter. A threshold for each weight keeps two bytes; what a prior of one's own
    # tells beside weights keeps all four.
    down = {"fedsparse-unstructured": 0.7, "trend": 0.65}.get(name, 0.5)
    if name not in ("fedpm", "fedtopk"):  # whose uploads are small in any precision: here mostly header and mask
        assert records[0]["bytes_up"] < 0.35 * full["bytes_up"]
    assert records[0]["bytes_down"] < down * full["bytes_down"]


def test_a_client_remembers_what_the_server_received():
    """SCAFFOLD's control variates: the server's stays the mean of the clients' by their examples, rounded or not."""
    sim = simulate("scaffold", wire="int4", clients_per_round=5)
    for _ in range(3):
        sim.step(evaluate=False)
    for name, control in sim.server["control"].items():
        share = torch.from_numpy(sim.data.train.sizes / sim.data.train.sizes.sum())
        mean = sum(share[client] * sim.memory[client]["control"][name] for client in range(5))
        torch.testing.assert_close(control, mean, rtol=0, atol=1e-12)


def test_unmoved_weights_equal_the_servers_bit_for_bit():
    """The median of clients that mostly stayed is the server's own weight, not one near it."""
    task = make_task(torch.float32)
    chosen = fedprior.algorithm("fedmedian", task.network, precision=0.05)
    sim = build(chosen, task.network, task.data, Settings(**{**task.defaults, "wire": "int4"}))
    before = {name: value.clone() for name, value in sim.server["weights"].items()}
    sim.step(evaluate=False)
    stayed = torch.cat([(sim.server["weights"][name] == value).flatten() for name, value in before.items()])
    assert 0.3 < float(stayed.float().mean()) < 1


def test_a_clients_codes_are_the_same_alone_and_stacked():
    network = fedprior.Network(PlainNet(), torch.zeros(1, 8, 8))
    params = network.params()
    layout = wire.Layout(
        {"weights": wire.Section({name: tuple(value.shape) for name, value in params.items()})}, precision="int4"
    )
    all_keys = keys.fold(keys.fold(keys.key(0), torch.arange(6)), Purpose.ROUNDING)
    draw = torch.Generator().manual_seed(0)
    uploads = {"weights": {n: v + 0.1 * torch.randn(6, *v.shape, generator=draw) for n, v in params.items()}}
    packet = {"weights": params}
    stacked = torch.func.vmap(lambda u, k: wire.quantise(u, layout, packet, k))(uploads, all_keys)
    for client in range(6):
        alone = wire.quantise(trees.row(uploads, client), layout, packet, all_keys[client])
        close(dict(trees.leaves(trees.row(stacked, client))), dict(trees.leaves(alone)))


def test_a_client_that_diverges_is_named(diverging_task):
    with pytest.raises(fedprior.DivergedError, match="client 1 diverged in round 1"):
        fedprior.run(diverging_task(wire="int4"), "fedavg", mode="in-turn")
    with pytest.raises(fedprior.DivergedError, match="client 1 diverged in round 1"):
        fedprior.run(diverging_task(wire="int4"), "fedavg", mode="vectorised")


def test_runs_older_than_the_setting_precision_continue(tmp_path):
    task = make_task()
    chosen = algorithm("fedavg", task)
    fedprior.run(task, chosen, out=tmp_path / "old", messages="count")
    config = tmp_path / "old" / "config.toml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith(("entropy =", "messages ="))]
    config.write_text("\n".join(lines).replace('wire = "float32"', 'wire = "count"') + "\n")
    _, found, _, _ = start.read_config(RunFolder(tmp_path / "old"))
    assert (found.wire, found.entropy, found.messages) == ("float32", True, "count")
    settings = run_settings(task.defaults, task.data.clients)
    specs.check_same(tmp_path / "old", config_of(Parts(task, chosen, settings), "fedavg"), whole=True)
    rounded = config_of(Parts(task, chosen, replace(settings, wire="int8")), "fedavg")
    with pytest.raises(fedprior.RunError, match="has wire = float32, not int8"):
        specs.check_same(tmp_path / "old", rounded, whole=True)
