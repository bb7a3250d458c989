"""What an evaluation finds of every client, beside the records: right, whole after a crash, and resumed exactly."""

import json
import math

import numpy as np
import pytest
import torch

import fedprior
from fedprior.core.metrics import over_clients
from fedprior.report.client_table import NAME, block, header, read_clients, until
from fedprior.report.page_data import clients_of
from fedprior.report.records import Broken, read_run
from fedprior.runs.early import STOP


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_every_clients_loss_and_accuracy_are_kept(small_task, tmp_path, mode):
    """The server's are those of its model on each client's own test examples; a client without any has none."""
    task = small_task((5, 11, 2, 8), test_sizes=(20, 3, 0, 7), dtype=torch.float64, clients_per_round=2, rounds=3)
    result = fedprior.run(task, "fedavg", out=tmp_path / "run", mode=mode)
    table = read_clients(tmp_path / "run")
    assert table.rounds.tolist() == [2, 3]
    assert table.columns == ("loss", "accuracy", "server_loss", "server_accuracy")
    data = task.data
    for client in range(4):
        rows = data.test[client]
        outputs, y = result.model(data.test_x[rows]).detach(), data.test_y[rows]
        accuracy = (outputs.argmax(1) == y).double().mean()
        loss = torch.nn.functional.cross_entropy(outputs, y) if len(rows) else math.nan
        assert table.last("server_accuracy")[client] == pytest.approx(float(accuracy), nan_ok=True)
        assert table.last("server_loss")[client] == pytest.approx(float(loss), rel=1e-5, nan_ok=True)
    own = result.simulation.scores["accuracy"].numpy()
    np.testing.assert_allclose(table.last("accuracy"), own, rtol=1e-6)
    summary = result.summary
    assert summary["local_accuracy"] == pytest.approx(np.nanmean(table.last("accuracy")))
    assert summary["local_accuracy_spread"] == pytest.approx(np.nanstd(table.last("accuracy")), abs=1e-7)
    assert summary["global_accuracy_worst"] == pytest.approx(np.nanmin(table.last("server_accuracy")))
    assert summary["global_loss_worst"] == pytest.approx(np.nanmax(table.last("server_loss")), rel=1e-6)


def test_the_worst_tenth_is_a_mean_over_it():
    values = torch.tensor([0.9] * 17 + [0.5, 0.1, 0.2, math.nan], dtype=torch.float64)
    found = over_clients({"accuracy": values, "loss": values})
    assert found["local_accuracy_worst"] == pytest.approx(0.15)
    assert found["local_loss_worst"] == pytest.approx(0.9)
    assert found["local_accuracy_spread"] == pytest.approx(np.std([0.9] * 17 + [0.5, 0.1, 0.2]))


def test_a_resumed_run_has_the_same_table(small_task, tmp_path, plain_arithmetic):
    """Stopped in the third round, with an evaluation that its checkpoint does not know of and half a block."""
    given = {"rounds": 6, "evaluate_every": 1, "checkpoint_every": 2, "seed": 3}
    fedprior.run(small_task(), "fedavg", out=tmp_path / "whole", **given)
    stop = lambda record: STOP if record["round"] == 4 else None  # noqa: E731
    fedprior.run(small_task(), "fedavg", out=tmp_path / "stopped", progress=stop, **given)
    path = tmp_path / "stopped" / NAME
    columns = {name: np.zeros(6) for name in read_clients(path.parent).columns}
    path.write_bytes(path.read_bytes() + block(5, columns) + block(6, columns)[:11])
    assert read_clients(path.parent).rounds.tolist() == [1, 2, 3, 4, 5]
    fedprior.resume(path.parent, task=small_task())
    assert path.read_bytes() == (tmp_path / "whole" / NAME).read_bytes()


def test_a_damaged_table_is_named(small_task, tmp_path):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "run", rounds=2, evaluate_every=1)
    path = tmp_path / "run" / NAME
    good = path.read_bytes()
    for bad, why in (
        (good[:-9] + b"?" + good[-8:], "clients.bin is damaged after evaluation 1"),
        (b"nothing", "does not say what is in it"),
        (b'{"format": "other"}\n', "does not say what is in it"),
        (b"[1]\n", "does not say what is in it"),
        (b"\xff\n", "clients.bin is damaged"),
    ):
        path.write_bytes(bad)
        found = read_run(path.parent)
        assert isinstance(found, Broken)
        assert why in found.reason
    path.write_bytes(good[: len(good) // 2])
    assert not isinstance(read_run(path.parent), Broken), "a crash is no damage"
    assert until(path.parent, 0) == b""
    assert until(tmp_path, 3) == b""


def test_the_page_has_the_distribution_and_the_gain_by_size(small_task, tmp_path):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "run", rounds=4)
    run = read_run(tmp_path / "run")
    found = clients_of(run)
    own, server = (run.clients.last(name) for name in ("accuracy", "server_accuracy"))
    known = np.isfinite(own)
    assert found["own"][0] == pytest.approx(own[known].min())
    assert found["server"][10] == pytest.approx(np.median(server))
    sizes = run.partition.train.sum(1)
    order = np.argsort(sizes[known], kind="stable")
    assert found["by_size"]["size"] == sizes[known][order].tolist()
    assert found["by_size"]["gain"] == pytest.approx((own - server)[known][order].tolist(), abs=1e-6)
    json.dumps(found, allow_nan=False)
    (tmp_path / "run" / NAME).write_bytes(header({"loss": np.zeros(6)}))
    assert clients_of(read_run(tmp_path / "run")) == {}
