"""Whole rounds of networks with BatchNorm: engines agree, statistics are those of the data, nothing depends on luck."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_batch_norm import Functional, Net
from torch import nn

import fedprior
from fedprior import wire
from fedprior.catalogue.models import ResNet20
from fedprior.core import trees
from fedprior.core.errors import DivergedError, ModelError, SettingError
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.loop.round import Simulation
from fedprior.engines.stacked.together import Together
from fedprior.runs.budget import run_bytes
from fedprior.units import find_structure
from test_contract import LIVELY, NAMES

D = torch.float64
CHANNELS = 4 + 6


def make_task(dtype: torch.dtype = D, **options: Any) -> fedprior.Task:
    """Clients of unequal sizes; with batches of four some end in a batch of one, which has no variance."""
    draw = torch.Generator().manual_seed(5)
    clients = []
    for size in (5, 9, 17, 3, 12):
        x = torch.randn(size + 4, 1, 8, 8, generator=draw).to(dtype)
        y = (x.mean((1, 2, 3)) * 12).long().clamp(-1, 1) + 1
        clients.append((x[:size], y[:size], x[size:], y[size:]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(**options).to(dtype)
    settings = {"rounds": 4, "batch_size": 4, "clients_per_round": 3, "evaluate_every": 1, "device": "cpu"}
    return fedprior.own_task(model, clients, classes=3, workers=1, **settings)


def algorithm(name: str, task: fedprior.Task) -> fedprior.Algorithm:
    return fedprior.algorithm(name, task.network, **LIVELY.get(name, {}))


def simulate(name: str = "fedavg", **settings: Any) -> Simulation:
    task = make_task()
    return build(algorithm(name, task), task.network, task.data, Settings(**{**task.defaults, **settings}))


# ---------------------------------------------------------------------- engines
KINDS = [
    ("shared", "received"),
    ("shared", "running"),
    ("shared", "final"),
    ("local", "running"),
    ("batch", "received"),
]


@pytest.mark.parametrize(
    ("name", "kind", "report"),
    [*((name, "shared", "received") for name in NAMES), *(("fedsparse", *kind) for kind in KINDS[1:])],
)
def test_vectorised_equals_in_turn_and_encoded_equals_counted(name, kind, report):
    settings = {"statistics": kind, "report_statistics": report, "statistics_momentum": 0.7, "epochs": 2}
    together, in_turn, counted = (simulate(name, **settings, messages=m) for m in ("count", "encode", "count"))
    engine = Together([together])
    for _ in range(2):
        (a,), b = engine.step(evaluate=True), in_turn.step(evaluate=True)
        assert counted.step(evaluate=True) == b
        for key, value in b.items():
            assert a[key] == (value if isinstance(value, (list, int)) else pytest.approx(value, abs=1e-9, nan_ok=True))
    found = dict(trees.leaves(together.server))
    for path, value in trees.leaves(in_turn.server):
        torch.testing.assert_close(found[path], value, rtol=0, atol=1e-9, msg=path)
    assert ("statistics" in in_turn.server) == (kind == "shared")
    kept = {client: remembered.get("statistics", {}) for client, remembered in in_turn.memory.items()}
    assert all(bool(memory) == (kind == "local") for memory in kept.values())
    for client, memory in kept.items():
        for path, value in memory.items():
            torch.testing.assert_close(together.memory[client]["statistics"][path], value, rtol=0, atol=1e-9)


class Stopped(Exception):
    """Raised by a progress callback to break a run off."""


@pytest.mark.parametrize(("kind", "report"), [("shared", "received"), ("local", "running")])
def test_resume_is_exact(kind, report, tmp_path):
    def stop(record):
        if record["round"] == 3:
            raise Stopped

    settings = {"statistics": kind, "report_statistics": report, "checkpoint_every": 2}
    whole = fedprior.run(make_task(), algorithm("fedsparse", make_task()), out=tmp_path / "whole", **settings)
    with pytest.raises(Stopped):
        fedprior.run(
            make_task(), algorithm("fedsparse", make_task()), out=tmp_path / "broken", progress=stop, **settings
        )
    resumed = fedprior.resume(tmp_path / "broken", task=make_task())
    assert resumed.records == whole.records
    for file in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


# ---------------------------------------------------------------------- what is pooled
def test_the_server_has_the_statistics_of_the_cohorts_examples():
    """The first norm reads the data through the first weights alone, so its statistics need no other code of ours."""
    sim = simulate(clients_per_round=5)
    first = copy.deepcopy(sim.network.module)
    union = sim.data.x[torch.cat([sim.data.train[client] for client in range(5)])]
    with torch.no_grad():
        seen = first.conv(union)
    sim.step(evaluate=False)
    found = sim.server["statistics"]
    torch.testing.assert_close(found["norm.running_mean"], seen.mean((0, 2, 3)))
    torch.testing.assert_close(found["norm.running_var"], seen.var((0, 2, 3), correction=0))
    assert float(found["count"]) == len(union)


def test_deeper_norms_are_measured_on_all_of_a_clients_examples_at_once():
    """As torch's own running averages of momentum one find them; up to eight batches are one pass."""
    sim = simulate(clients_per_round=1)
    module = copy.deepcopy(sim.network.module).train()
    module.norm1.momentum = 1.0
    sim.step(evaluate=False)
    found = sim.server["statistics"]
    (client,) = (c for c in range(5) if sim.data.train.size(c) == int(found["count"]))
    examples = sim.data.x[sim.data.train[client]]
    assert sim.workload.batch_size < len(examples) <= 8 * sim.workload.batch_size
    module(examples)
    unbiased = len(examples) / (len(examples) - 1)
    torch.testing.assert_close(found["norm1.running_mean"], module.norm1.running_mean)
    torch.testing.assert_close(found["norm1.running_var"] * unbiased, module.norm1.running_var)


def test_momentum_keeps_part_of_known_statistics_and_none_of_unknown_ones():
    slow, quick = simulate(statistics_momentum=0.25), simulate()
    for round_ in range(2):
        before = {name: value.clone() for name, value in slow.server["statistics"].items()}
        slow.step(evaluate=False)
        quick.step(evaluate=False)
        for name, now in quick.server["statistics"].items():
            share = 1 if round_ == 0 or name == "count" else 0.25
            torch.testing.assert_close(slow.server["statistics"][name], before[name] + share * (now - before[name]))


def test_running_averages_equal_torchs(monkeypatch):
    """One client, whose training torch repeats with modules of its own."""
    task = make_task()
    for norm in (task.network.module.norm, task.network.module.norm1):
        norm.num_batches_tracked += 1  # what is there is to be started from
    chosen = Settings(
        **{**task.defaults, "clients_per_round": 1, "report_statistics": "running", "batch_size": 50, "epochs": 3}
    )
    sim = build(fedprior.algorithm("fedavg", task.network), task.network, task.data, chosen)
    seen = []
    original = fedprior.Network.training_with_statistics

    def spy(self, params, x, y, weight, key):
        seen.append(({name: value.detach().clone() for name, value in params.items()}, x))
        return original(self, params, x, y, weight, key)

    monkeypatch.setattr(fedprior.Network, "training_with_statistics", spy)
    sim.step(evaluate=False)
    module = copy.deepcopy(task.network.module).train()
    for params, x in seen:
        torch.func.functional_call(module, params, (x,))
    for name, buffer in module.named_buffers():
        if "running" in name:
            torch.testing.assert_close(sim.server["statistics"][name], buffer)
    assert len(seen) == 3


@pytest.mark.parametrize("wire_", ["float32", "int8/int4"])
def test_statistics_travel_in_full_precision_and_are_counted(wire_):
    with_, without = (simulate(statistics=kind, wire=wire_, entropy=False) for kind in ("shared", "batch"))
    one, other = with_.step(evaluate=False), without.step(evaluate=False)
    extra = 3 * 8 * (2 * CHANNELS + 1)
    assert one["bytes_up"] - other["bytes_up"] == one["bytes_down"] - other["bytes_down"] == extra
    torch.testing.assert_close(with_.server["weights"], without.server["weights"], rtol=0, atol=0)


def test_rows_of_closed_units_are_not_sent():
    task = make_task()
    chosen = algorithm("feddrop", task)
    server = chosen.init(task.network.params(), task.network.statistics())
    layout = chosen.uplink(server)
    gates = {name: torch.ones(shape, dtype=D) for name, shape in layout.gates.items()}
    packet = {"weights": task.network.params(), "gates": gates}
    message = chosen.report(packet, server["statistics"], packet)
    closed = {layer: gate.clone() for layer, gate in gates.items()}
    closed["conv"][1] = 0
    fewer = chosen.report({**packet, "gates": closed}, server["statistics"], packet)
    read = [wire.decode(wire.encode(m, layout), layout) for m in (message, fewer)]
    assert read[0]["statistics"]["norm.running_var"].tolist() == [1, 1, 1, 1]
    assert read[1]["statistics"]["norm.running_var"].tolist() == [1, 0, 1, 1]
    alone = replace(layout, sections={"statistics": layout.sections["statistics"]})
    lengths = [wire.message_bytes(m, alone) for m in (message, fewer)]
    assert lengths[0] - lengths[1] == 2 * 8
    pooled = chosen.absorb(server, {**trees.stack([fewer, fewer])})["statistics"]
    torch.testing.assert_close(pooled["norm.running_var"], server["statistics"]["norm.running_var"])


# ---------------------------------------------------------------------- what comes out
def test_the_finished_model_predicts_as_evaluated(tmp_path):
    task = make_task()
    result = fedprior.run(task, "fedavg", out=tmp_path / "run")
    rows = task.data.test.rows.unique()
    x, y = task.data.test_x[rows], task.data.test_y[rows]
    with torch.no_grad():
        together, alone = result.model(x), torch.cat([result.model(row[None]) for row in x])
    torch.testing.assert_close(together, alone)
    accuracy = float((together.argmax(-1) == y).double().mean())
    assert accuracy == pytest.approx(result.records[-1]["global_accuracy"])
    assert fedprior.evaluate(tmp_path / "run", task=make_task())["accuracy"] == pytest.approx(accuracy)
    assert int(result.model.norm.num_batches_tracked) == 0
    assert not torch.equal(result.model.norm.running_mean, torch.zeros(4, dtype=D))


@pytest.mark.parametrize("kind", ["batch", "local"])
def test_without_shared_statistics_only_personal_models_are_exported(kind, tmp_path):
    task = make_task(torch.float32)
    result = fedprior.run(task, "fedavg", statistics=kind, rounds=1)
    with pytest.raises(ModelError, match=r"'norm' has no statistics to export.*statistics=shared"):
        fedprior.export(result, tmp_path / "server", onnx=False)
    assert not (tmp_path / "server").exists()
    if kind == "local":
        said = fedprior.export(result, tmp_path / "own", personalise=2, onnx=False)
        assert said["compared"]["torch"]["same_predictions"] == said["compared"]["torch"]["inputs"]


def test_exports_have_their_norms_folded_and_closed_units_removed(tmp_path):
    task = make_task(torch.float32)
    result = fedprior.run(task, "fedavg", rounds=2)
    with torch.no_grad():
        for part in (result.model.conv.weight, result.model.norm.weight, result.model.norm.bias):
            part[1:3] = 0
        result.model.norm.running_var.mul_(3)
    said = fedprior.export(result, tmp_path / "out")
    assert said["units"]["conv"] == [2, 4]
    for found in said["compared"].values():
        assert found["same_predictions"] == found["inputs"]
    source = (tmp_path / "out" / "model.py").read_text(encoding="utf-8")
    assert "BatchNorm" not in source
    # Weights and biases of the layers, and nothing of the norms.
    assert said["sizes"]["compact"]["parameters"] == (2 * 9 + 2) + (2 * 9 * 6 + 6) + (6 * 3 + 3)


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize("kind", ["shared", "local"])
def test_a_client_whose_statistics_are_not_finite_is_named(kind):
    """Its loss is: what has an infinite variance is normalised to zero."""
    task = make_task(torch.float32)
    task.data.x[task.data.train[3]] *= 1e25
    for engine in ("in-turn", "vectorised"):
        chosen = {**task.defaults, "clients_per_round": 5, "statistics": kind, "mode": engine}
        with pytest.raises(DivergedError, match="client 3 diverged in round 1"):
            fedprior.run(task, "fedavg", **{**chosen, "rounds": 1, "bound": 0})
        (record,) = fedprior.run(task, "fedavg", **{**chosen, "rounds": 1}).records
        assert [fault["client"] for fault in record["faults"]] == [3]
        assert "not finite" in record["faults"][0]["what"]


def test_invalid_statistics_settings_are_refused():
    for settings, text in (
        ({"statistics": "mine"}, "statistics must be shared, local or batch, got 'mine'"),
        ({"report_statistics": "all"}, "report_statistics must be received, running or final, got 'all'"),
        ({"statistics_momentum": 0.0}, "statistics_momentum must be above 0"),
        ({"statistics_momentum": math.nan}, "statistics_momentum must be above 0"),
    ):
        with pytest.raises(SettingError, match=text):
            Settings(**settings)


def test_norms_without_an_affine_part_train_and_are_refused_for_gates():
    task = make_task(affine=False, momentum=None)
    assert math.isfinite(fedprior.run(task, "fedavg", rounds=1).records[-1]["train_loss"])
    with pytest.raises(ModelError, match=r"'norm' \(BatchNorm2d\) without affine parameters.*ungated=conv"):
        fedprior.algorithm("fedsparse", task.network)


def test_custom_norm_code_needs_shared_statistics():
    clients = [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(2)]
    task = fedprior.own_task(Functional(), clients, clients_per_round=2, batch_size=3, device="cpu")
    result = fedprior.run(task, "fedavg", rounds=1)
    assert not torch.equal(result.model.running_mean, torch.zeros(3))
    with pytest.raises(ModelError, match=r"statistics=batch\. Use nn\.BatchNorm, or statistics=shared"):
        fedprior.run(task, "fedavg", rounds=1, statistics="batch")


def test_a_layer_called_twice_pools_both_statistics():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.fc(x)) + self.norm(torch.stack([5 + 2 * x, x], 2)).sum(2)  # then with two places

    net, x = fedprior.Network(Twice(), torch.zeros(3)), torch.randn(7, 3)
    union = torch.cat([net.module.fc(x), 5 + 2 * x, x])
    found = net.measure(net.params(), x, None)
    torch.testing.assert_close(found["mean"], union.mean(0))
    torch.testing.assert_close(found["variance"], union.var(0, correction=0))
    padded, weight = torch.cat([x, torch.full((2, 3), 9.0)]), torch.ones(9).index_fill(0, torch.tensor([7, 8]), 0)
    torch.testing.assert_close(net.measure(net.params(), padded, weight), found)


def test_a_budget_includes_the_statistics():
    task = make_task()
    chosen = fedprior.algorithm("fednarrow", task.network, sparsity=0.3, dense_rounds=0)
    settings = Settings(**{**task.defaults, "rounds": 1})
    result = fedprior.run(task, chosen, rounds=1)
    sent = result.summary["bytes_up"] + result.summary["bytes_down"]
    assert run_bytes(chosen, task.network, settings, task.data.clients) == sent


def test_units_are_found_as_with_group_norm():
    found = [find_structure(ResNet20(classes=5, norm=norm), torch.zeros(3, 8, 8)) for norm in ("batch", "group")]
    assert found[0] == found[1]
    assert "blocks.0.norm1.weight" in next(one for one in found[0].layers if one.name == "blocks.0.conv1").parameters


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_attackers_train_with_any_norm(kind):
    task = make_task()
    task.network.module.norm = kind(4).double()
    result = fedprior.run(task, "fedmedian", rounds=1, attack="sign-flip", attackers=0.4)
    assert math.isfinite(result.records[-1]["train_loss"])
