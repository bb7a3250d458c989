"""One algorithm object, several engines: what Flower's strategy and clients compute is what the simulator computes."""

import math

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import torch
from local_grid import LocalGrid
from torch import nn

import fedprior
import own_prior
from fedprior.core import trees
from fedprior.core.settings import Settings
from fedprior.engines.build import build
from fedprior.flower import HardEM, Job, Server, client_app, named_job, own_job

RUN = "0123456789abcdef"
COUNTED = ("round", "bytes_up", "bytes_down", "floored", "global_accuracy", "sparsity")
"""No sum of floats is in these."""
ROUNDED = [
    *own_prior.ENTRIES,
    "fedsparse+scaffold",
    "fedsparse-unstructured",
    "feddrop",
    "fedmedian",
    "fedmix",
    "fedl1",
    "fedtopk",
    "fedpm",
    "fedsparse-sized",
]


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        *((name, "float32") for name in [*fedprior.ALGORITHMS, *own_prior.ENTRIES]),
        *((name, "int8/int4") for name in ROUNDED),
        ("fedavg", "int4"),
        ("fednarrow", "int4"),
    ],
)
def test_same_numbers_as_the_simulator(name, wire, make_job, quick, tmp_path):
    """In float64: a temperature, Adam and rounding to a grid make much of a last bit of float32."""
    options = {"local_optimiser": "SGD(lr=0.1)"}
    if name == "fednarrow":
        options |= {"sparsity": 0.3, "linear_rate": 0.4, "conv_rate": 0.2, "average": True}
    elif name == "fedsparse-sized":
        options |= {"sparsity": 0.3, "linear_rate": 0.4, "temperature": 0.05}
    elif name.startswith("fedsparse"):
        options |= {"temperature": 0.05, "lambda0": 1e-3}  # so that gates close within three rounds
    settings = {"evaluate_every": 2, "wire": wire}
    if wire != "float32" or name in ("fedadam", "scaffold"):  # half of them with rates that change
        settings["lr_schedule"] = "cosine(warmup=1)"
        if name in ("fedadam", "fedsparse+scaffold", "fedl1"):
            options["server_optimiser"], settings["server_lr_schedule"] = "Adam(lr=0.01)", "linear(end=0.2)"
    job = make_job(name, settings, dtype=torch.float64, **options)
    simulated = build(job.algorithm, job.network, job.data, job.settings)
    records = [simulated.step(evaluate=number in (2, 3)) for number in (1, 2, 3)]

    server, kept = Server.new(job, RUN), []
    HardEM(server, quick, kept.append).start(LocalGrid(job, tmp_path))

    for (path, ours), (other, theirs) in zip(trees.leaves(server.state), trees.leaves(simulated.server), strict=True):
        assert path == other
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=path)
    assert torch.equal(server.accuracy.nan_to_num(-1), simulated.accuracy.nan_to_num(-1))
    for ours, theirs in zip(kept, records, strict=True):
        clients = ours.pop("clients")
        assert len(clients) == 3
        assert ours.pop("examples") == [(5, 11, 2, 8, 9, 3)[client] for client in clients]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            counted = key in COUNTED
            assert ours[key] == (value if counted else pytest.approx(value, rel=0, abs=1e-9, nan_ok=True)), key


def test_a_regression_has_the_simulators_scores_and_no_accuracy(quick, tmp_path):
    """Also where the server has no test examples: then only the clients' own scores are known."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((5, 3), (5, 1), (2, 3), (2, 1))
    clients = [tuple(torch.randn(*size, generator=draw).double() for size in sizes) for _ in range(3)]
    settings = {"rounds": 2, "clients_per_round": 3, "batch_size": 2, "evaluate_every": 1, "device": "cpu"}
    metrics = {"mae": lambda outputs, y: (outputs - y).abs().mean()}
    model, loss = nn.Linear(3, 1).double(), nn.MSELoss(reduction="none")
    task = fedprior.own_task(model, clients, loss=loss, metrics=metrics, **settings)
    algorithm = fedprior.algorithm("fedavg", task.network)
    expected = fedprior.run(task, algorithm, workers=1).records
    for test in (task.data, None):
        job = Job("own", task.network, algorithm, Settings(**settings), 3, task.data, test)
        kept = []
        HardEM(Server.new(job, RUN), quick, kept.append).start(LocalGrid(job, tmp_path))
        for ours, theirs in zip(kept, expected, strict=True):
            scores = {key for key in theirs if key.startswith(("global_", "local_"))}
            names = ("loss", "loss_worst", "loss_spread", "mae")
            assert scores == {f"{where}_{name}" for where in ("global", "local") for name in names}
            assert {key for key in ours if key.startswith(("global_", "local_"))} == scores
            for key in scores:
                value = theirs[key] if test is not None or key.startswith("local_") else math.nan
                assert ours[key] == pytest.approx(value, rel=1e-12, nan_ok=True)


def test_clients_of_own_jobs_report_an_accuracy_if_there_is_one(quick, tmp_path):
    config = {"algorithm": "fedavg", "settings": "rounds=1; clients_per_round=2; device=cpu; evaluate_every=1"}
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    parts = [(x[i : i + 3], x[i : i + 3].argmax(1), x[i + 3 : i + 6], x[i + 3 : i + 6].argmax(1)) for i in (0, 6)]
    for loss, known in (
        (None, True),
        (lambda o, y: (o[:, 0] - y).square(), True),
        (lambda o, y: (o[:, 0] - y[:, 0]) ** 2, False),
    ):
        given = {} if loss is None else {"loss": loss}
        job = own_job(config, nn.Linear(3, 3), x[0], clients=2, **given)
        data = parts if known else [(a, b[:, None], c, d[:, None]) for a, b, c, d in parts]
        grid = LocalGrid(job, tmp_path)
        grid.app = client_app(
            lambda config, job=job: job, lambda job, context, data=data: data[context.node_config["partition-id"]]
        )
        kept = []
        HardEM(Server.new(job, RUN), quick, kept.append).start(grid)
        assert kept[0]["local_loss"] > 0
        assert ("local_accuracy" in kept[0]) == ("global_accuracy" in kept[0]) == known


class Weighed(nn.Module):
    """A linear layer on what two inputs have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return self.out(values * kept)


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_devices_that_load_dictionaries_have_the_simulators_numbers(wire, quick, tmp_path):
    """Several inputs, several labels, an own loss and metric; each device's data are its own."""
    draw = torch.Generator().manual_seed(1)

    def part(count):
        x = {"values": torch.randn(count, 3, generator=draw).double(), "kept": torch.ones(count, 3).bool()}
        return x, (x["values"][:, :2] > 0).double()

    clients = [(*part(size), *part(2)) for size in (5, 2, 4)]
    given = {
        "loss": nn.BCEWithLogitsLoss(reduction="none"),
        "metrics": {"hits": lambda outputs, y: ((outputs > 0) == (y > 0)).double()},
    }
    settings = {
        "rounds": 2,
        "clients_per_round": 3,
        "batch_size": 2,
        "evaluate_every": 1,
        "device": "cpu",
        "wire": wire,
    }
    model = Weighed().double()
    expected = fedprior.run(fedprior.own_task(model, clients, **given), "fedavg", workers=1, **settings).records
    config = {"algorithm": "fedavg", "settings": "; ".join(f"{name}={value}" for name, value in settings.items())}
    example = {name: values[0] for name, values in clients[0][0].items()}
    job = own_job(config, model, example, clients=3, **given)
    grid, kept = LocalGrid(job, tmp_path), []
    grid.app = client_app(lambda config: job, lambda job, context: clients[context.node_config["partition-id"]])
    HardEM(Server.new(job, RUN), quick, kept.append).start(grid)
    for ours, theirs in zip(kept, expected, strict=True):
        assert ours["bytes_up"] == theirs["bytes_up"]
        for key in ("train_loss", "local_loss", "local_hits"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-9)


def test_a_transformer_learns_text_on_devices_as_in_the_simulator(quick, tmp_path):
    options = {"width": 8, "layers": 1, "heads": 2, "context": 16, "least": 20000}
    settings = {"rounds": 2, "clients_per_round": 2, "local_steps": 2, "evaluate_every": 2, "device": "cpu"}
    algorithm = {"sparsity": 0.3, "local_optimiser": "SGD(lr=0.1)"}
    task = fedprior.task("shakespeare-mini", **options)
    built = fedprior.algorithm("fedsparse-sized", task.network, **algorithm)
    expected = fedprior.run(task, built, workers=1, **settings).records
    told = "; ".join(f"{name}={value}" for name, value in {**options, **settings, **algorithm}.items())
    job = named_job({"task": "shakespeare-mini", "algorithm": "fedsparse-sized", "settings": told})
    kept = []
    HardEM(Server.new(job, RUN), quick, kept.append).start(LocalGrid(job, tmp_path))
    for ours, theirs in zip(kept, expected, strict=True):
        assert (ours["bytes_up"], ours["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])
        for key in ("train_loss", *(["global_bits", "local_bits"] if "global_bits" in theirs else [])):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)  # float32
    assert "global_bits" in expected[-1]


class Normed(nn.Module):
    """The small task's network with BatchNorm of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.fc1, self.norm1, self.fc2 = nn.Linear(36, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.fc2(torch.relu(self.norm1(self.fc1(x.flatten(1)))))


@pytest.mark.parametrize(
    ("statistics", "report", "wire"),
    [("shared", "received", "int8/int4"), ("shared", "running", "float32"), ("local", "running", "float32")],
)
def test_norm_statistics_equal_the_simulators(statistics, report, wire, small_task, quick, tmp_path):
    settings = {"statistics": statistics, "report_statistics": report, "wire": wire, "rounds": 2, "evaluate_every": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = fedprior.Network(Normed().double(), torch.zeros(1, 8, 8, dtype=torch.float64))
    task = small_task(dtype=torch.float64)
    algorithm = fedprior.algorithm("fedsparse", network, temperature=0.05, lambda0=1e-3)
    chosen = Settings(**{**task.defaults, **settings})
    job = Job("small", network, algorithm, chosen, task.data.clients, task.data, task.data)
    simulated = build(job.algorithm, network, job.data, job.settings)
    records = [simulated.step(evaluate=True) for _ in range(2)]
    server, kept = Server.new(job, RUN), []
    HardEM(server, quick, kept.append).start(LocalGrid(job, tmp_path))
    for (path, ours), (_, theirs) in zip(trees.leaves(server.state), trees.leaves(simulated.server), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=path)
    for ours, theirs in zip(kept, records, strict=True):
        for key in ("bytes_up", "bytes_down", "global_accuracy", "local_accuracy"):
            assert ours[key] == pytest.approx(theirs[key]), key
    assert ("statistics" in server.state) == (statistics == "shared")
