"""A deployed network of one's own comes out of the run's folder, though no client's examples are there."""

import json
import re

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import numpy as np
import safetensors.torch
import torch
from local_grid import LocalGrid
from torch import nn

import fedprior
from fedprior.cli.app import app
from fedprior.core.errors import DataError, RunError, SettingError
from fedprior.flower import client_app, own_job
from fedprior.flower.apps import serve
from fedprior.trained.compact.export_folder import load_module

CONFIG = {
    "task": "own",
    "algorithm": "fedsparse",
    "settings": "rounds=3; batch_size=10; lambda0=1e-3; device=cpu",
}
APP = """
import torch
from torch import nn
from fedprior.flower import own_job

def make_job(config, **given):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return own_job(config, net, torch.zeros(6), clients=3, **given)

def tested(config):
    return make_job(config, test=(torch.ones(2, 6), torch.tensor([0, 1])))

def real(config):
    return make_job(config, loss=lambda outputs, y: (outputs - y).square().mean(1))

def nothing(config):
    return 3
"""


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def part(count, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return x, x[:, :3].argmax(1)


CLIENTS = [(*part(40, client), *part(10, 10 + client)) for client in range(3)]


@pytest.fixture
def deployed(tmp_path, plain_arithmetic):
    """The folder of a run whose devices had the examples."""

    def run(**given):
        config = {**CONFIG, **given, "out": str(tmp_path / "run")}
        job = own_job(config, net(), torch.zeros(6), clients=3)
        grid = LocalGrid(job, tmp_path)
        grid.app = client_app(lambda config: job, lambda job, context: CLIENTS[context.node_config["partition-id"]])
        serve(job, grid, {**config, "round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 3})
        return tmp_path / "run"

    return run


@pytest.fixture
def quickly(monkeypatch):
    """Exports that take no time for their speed."""
    monkeypatch.setattr("fedprior.trained.compact.export_folder.fastest", lambda calls: [1.0] * len(calls))


def network():
    return fedprior.Network(net(), torch.zeros(6))


def test_it_is_exported_from_folder_and_network_and_is_the_simulators(deployed, quickly, tmp_path):
    run, x = deployed(), torch.cat([client[2] for client in CLIENTS])
    found = fedprior.export(run, tmp_path / "small", network=network(), onnx=False)
    assert found["compared"]["torch"]["inputs"] == 64
    assert found["compared_on"] == "inputs around the example"
    assert 0 < found["units"]["0"][0] < 16, "nothing was pruned, so this tests nothing"

    # The truth: the server's final weights, put into the module by hand.
    whole = net()
    whole.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"))
    small = load_module(tmp_path / "small")
    torch.testing.assert_close(small(x), whole(x))

    task = fedprior.own_task(net(), CLIENTS, batch_size=10)
    options = {"lambda0": 1e-3}
    algorithm = fedprior.algorithm("fedsparse", task.network, **options)
    simulated = fedprior.run(task, algorithm, rounds=3, clients_per_round=3, device="cpu", workers=1)
    assert found["units"] == fedprior.export(simulated, tmp_path / "simulated", onnx=False)["units"]
    torch.testing.assert_close(small(x), load_module(tmp_path / "simulated")(x))


def test_it_is_evaluated_on_what_the_server_is_given(deployed, tmp_path):
    run = deployed(algorithm="fedgauss", settings="rounds=2; batch_size=10; device=cpu")
    x, y = (torch.cat([client[place] for client in CLIENTS]) for place in (2, 3))
    found = fedprior.evaluate(run, network=network(), data=(x, y))
    task = fedprior.own_task(net(), CLIENTS)
    assert found == fedprior.evaluate(run, task=task)
    drawn = fedprior.posterior(run, network=network(), samples=3)
    torch.testing.assert_close(drawn(x), fedprior.posterior(run, task=task, samples=3)(x))
    assert fedprior.evaluate(run, network=network(), data=(x, y), posterior=drawn)["server"] == {
        key: value for key, value in found.items() if key not in ("title", "examples")
    }
    (run / "model.safetensors").unlink()  # as of a run that has not ended
    assert fedprior.evaluate(run, network=network(), data=(x, y)) == found


def test_the_commands_take_the_apps_own_job(deployed, quickly, tmp_path, capsys):
    run, file = deployed(), tmp_path / "job.py"
    file.write_text(APP)
    np.savez(tmp_path / "test.npz", x=CLIENTS[0][2].numpy(), y=CLIENTS[0][3].numpy())

    def export(to, *more):
        app(["export", str(run), "--to", str(tmp_path / to), "--no-onnx", *more], standalone_mode=False)
        return json.loads((tmp_path / to / "model.json").read_text())

    job = ["--job", f"{file}:make_job"]
    found = export("small", *job)
    assert (found["title"], found["compared_on"]) == ("own, fedsparse, round 3", "inputs around the example")
    assert export("tested", "--job", f"{file}:tested")["compared_on"] == "test inputs"
    capsys.readouterr()
    app(["evaluate", str(run), "--data", str(tmp_path / "test.npz"), *job], standalone_mode=False)
    right = fedprior.evaluate(run, network=network(), data=CLIENTS[0][2:])["accuracy"]
    assert f"{100 * right:.2f}%" in capsys.readouterr().out
    # What the targets are is known from the file: these are no classes.
    np.savez(tmp_path / "real.npz", x=CLIENTS[0][2].numpy(), y=np.ones((10, 3)))
    app(["evaluate", str(run), "--data", str(tmp_path / "real.npz"), "--job", f"{file}:real"], standalone_mode=False)
    module = net()
    module.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"))
    error = (module(CLIENTS[0][2]) - 1).square().mean().item()
    assert f"{error:.4f}" in capsys.readouterr().out
    for arguments, why in (
        ([], "export it with --job, or from Python"),
        (["--job", f"{file}:nothing"], "returned an int; name the app's function that makes its job"),
        (["--job", f"{file}:none"], "has no function 'none'; it has make_job"),
        (["--personalise", "1", *job], "a client's own model is trained on its examples"),
    ):
        with pytest.raises(fedprior.FedpriorError, match=re.escape(why)):
            export("other", *arguments)


def test_what_does_not_fit_is_one_line(deployed, tmp_path):
    run, fitting = deployed(), network()
    wide = fedprior.Network(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(6))
    for given, error, why in (
        ({"network": net()}, SettingError, r"give fedprior\.Network\(module, example\)"),
        ({"network": wide}, RunError, "holds the weights of another network"),
        ({"network": fitting, "task": fedprior.own_task(net(), CLIENTS)}, SettingError, "not both"),
        ({"network": fitting}, DataError, "there are no test examples"),
        ({"network": fitting, "data": (torch.zeros(3, 6), torch.zeros(2))}, DataError, "3 test inputs but 2 test"),
    ):
        with pytest.raises(error, match=why):
            fedprior.evaluate(run, **given)


def test_other_frozen_weights_are_noticed(deployed, monkeypatch):
    """Nothing of them is in the folder, so a network with others would be a wrong one."""
    base = net()

    monkeypatch.setattr(f"{__name__}.net", lambda: fedprior.adapt(base, rank=2))
    run = deployed(algorithm="fedavg", settings="rounds=1; batch_size=10; device=cpu")
    assert fedprior.evaluate(run, network=network(), data=CLIENTS[0][2:])["examples"] == 10
    known = own_job(CONFIG, net(), torch.zeros(6), clients=3).agreed()
    with torch.no_grad():
        base[0].bias += 1
    now = own_job(CONFIG, net(), torch.zeros(6), clients=3).agreed()
    assert [name for name in known if known[name] != now[name]] == ["frozen weights"], "devices say what they adapt"
    with pytest.raises(RunError, match="was trained beside the frozen weights"):
        fedprior.evaluate(run, network=network(), data=CLIENTS[0][2:])
