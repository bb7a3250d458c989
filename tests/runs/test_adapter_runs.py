"""Federated runs of a frozen network with adapters: bytes, memory, folders, exports."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedprior
from fedprior import wire
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.engines.stacked.together import Together
from fedprior.trained.compact.export_folder import load_module
from small_world import small_clients, small_net

ADAPTER = 4 * (36 + 12)


def make_task(seed: int = 0) -> fedprior.Task:
    net = fedprior.adapt(small_net(seed), 4, targets="fc1")
    defaults = {"rounds": 3, "clients_per_round": 3, "local_steps": 4, "evaluate_every": 1}
    return fedprior.own_task(net, small_clients([12] * 5), **defaults)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task, path = make_task(), tmp_path_factory.mktemp("adapters") / "run"
    fedprior.run(task, fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.3)"), out=path)
    return path


def test_a_rounds_bytes_are_the_adapters(folder):
    for record in fedprior.resume(folder, task=make_task()).records:
        assert record["bytes_up"] == record["bytes_down"] == 3 * (wire.HEADER_BYTES + 4 * ADAPTER)


def test_open_components_travel_and_closed_ones_do_not():
    task = make_task()
    chosen = fedprior.algorithm("fedsparse-sized", task.network, sparsity=0.5, closing=0.34)
    records = fedprior.run(task, chosen, evaluate_every=1).records
    left = records[-1]["units/fc1"]
    assert left == 2
    bitmap, asked = 1, 4
    assert records[-1]["bytes_up"] == 3 * (wire.HEADER_BYTES + bitmap + 4 * left * 48)
    assert records[-1]["bytes_down"] == 3 * (wire.HEADER_BYTES + bitmap + asked + 4 * left * 48)


def test_the_folder_holds_the_adapter_alone_and_loads_beside_the_same_network(folder):
    assert (folder / "model.safetensors").stat().st_size < 4 * ADAPTER + 300
    scores = fedprior.evaluate(folder, task=make_task())
    assert scores["accuracy"] == pytest.approx(fedprior.resume(folder, task=make_task()).summary["global_accuracy"])
    assert '[frozen]\nparameters = 536\nfingerprint = "' in (folder / "config.toml").read_text()
    for call in (fedprior.evaluate, fedprior.resume):
        with pytest.raises(fedprior.RunError, match="adapt the same network as then"):
            call(folder, task=make_task(seed=1))


def test_an_export_has_no_adapter_any_more(folder, tmp_path):
    task = make_task()
    described = fedprior.export(folder, tmp_path / "out", task=task, onnx=False)
    assert described["sizes"]["compact"]["parameters"] == sum(p.numel() for p in small_net().parameters())
    loaded, trained = load_module(tmp_path / "out"), fedprior.resume(folder, task=task).model
    x = task.data.test_x
    torch.testing.assert_close(loaded(x), trained(x), rtol=0, atol=1e-5)
    assert not torch.allclose(loaded(x), small_net()(x), atol=1e-3), "it has learned something"


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made._is_view():
            self.numbers = max(self.numbers, made.numel())
        return made


def test_a_hundred_clients_share_one_frozen_network():
    """Stacked or in turn, no tensor in a round is larger than what all clients train; 100 copies of one frozen weight
    would be 16 million numbers."""
    wide, clients = 400, 100
    net = nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 3))
    net = fedprior.adapt(net, 1, targets="2", train="4")
    x, y = torch.randn(clients, 2, 4), torch.randint(3, (clients, 2))
    task = fedprior.own_task(net, [(*pair, *pair) for pair in zip(x, y, strict=True)])
    algorithm = fedprior.algorithm("fedavg", task.network)
    settings = Settings(clients_per_round=clients, local_steps=1, batch_size=2)
    for stacked in (True, False):
        sim = build(algorithm, task.network, task.data, dataclasses.replace(settings, workers=2))
        networks = [sim.workers.networks.get() for _ in range(2)]
        assert {n.module[2].base.weight.data_ptr() for n in networks} == {net[2].base.weight.data_ptr()}
        for network in networks:
            sim.workers.networks.put(network)
        engine = Together([sim]) if stacked else sim
        with Largest() as largest:
            engine.step(evaluate=False)
        assert 0 < largest.numbers <= clients * sum(p.numel() for p in net.parameters() if p.requires_grad)
