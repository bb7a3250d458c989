"""Models out of a run: the server's as it was recorded, and a client's own as the next round would make it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedprior
from fedprior.core.errors import DataError, RunError, SettingError
from fedprior.trained.export import personal_model, trained


@pytest.mark.parametrize("name", ["fedavg", "fedsparse", "fedmix", "fedl1", "fedsparse-unstructured"])
def test_evaluating_a_run_gives_its_recorded_accuracy(name, small_task, tmp_path: Path) -> None:
    task = small_task()
    result = fedprior.run(task, name, out=tmp_path / "run")
    for run, given in ((result, {}), (tmp_path / "run", {"task": task})):
        found = fedprior.evaluate(run, **given)
        assert found["accuracy"] == pytest.approx(result.summary["global_accuracy"])
        assert sum(right for right, _ in found["by_class"].values()) == pytest.approx(
            result.summary["global_accuracy"] * found["examples"]
        )
    # Without its final model, the last checkpoint's, which is the same.
    (tmp_path / "run" / "model.safetensors").unlink()
    assert fedprior.evaluate(tmp_path / "run", task=task) == found


def test_personal_models_are_the_uploads_of_the_next_round(small_task) -> None:
    task = small_task(clients_per_round=6)
    result = fedprior.run(task, "fedavg")
    sim = result.simulation
    own = [personal_model(sim, client) for client in range(6)]
    sim.step(evaluate=False)
    counts = [task.data.train.size(client) for client in range(6)]
    for name, value in sim.server["weights"].items():  # FedAvg's M-step is their mean, by examples
        each = [dict(model.named_parameters())[name].detach() for model in own]
        mean = sum(count * one for count, one in zip(counts, each, strict=True)) / sum(counts)
        torch.testing.assert_close(mean, value)


@pytest.mark.parametrize("name", ["fedsparse", "feddrop", "fedmedian", "fedmix", "scaffold", "fedsparse+scaffold"])
def test_personal_accuracy_is_what_the_next_round_would_record(name, small_task, tmp_path: Path) -> None:
    task = small_task((20, 30, 12), test_sizes=(40, 30, 50), clients_per_round=3)
    result = fedprior.run(task, name, out=tmp_path / "run")
    found = [fedprior.evaluate(tmp_path / "run", task=task, personalise=client) for client in range(3)]
    assert [row["examples"] for row in found] == [40, 30, 50]
    for client, row in enumerate(found):
        server = trained(result).module
        x, y = (part[task.data.test[client]] for part in (task.data.test_x, task.data.test_y))
        assert row["server"]["accuracy"] == pytest.approx(float((server(x).argmax(1) == y).double().mean()))
    result.simulation.step(evaluate=False)
    assert [row["accuracy"] for row in found] == pytest.approx(result.simulation.accuracy.tolist())


def test_a_result_and_its_folder_give_the_same_export(tmp_path: Path, monkeypatch) -> None:
    # Nobody reads the times.
    monkeypatch.setattr("fedprior.trained.compact.export_folder.fastest", lambda calls: [1.0] * len(calls))
    task = fedprior.task("mnist-mini", clients=50)
    result = fedprior.run(task, "fedavg", rounds=1, clients_per_round=2, device="cpu", out=tmp_path / "run")
    for run, to in ((result, "from-result"), (tmp_path / "run", "from-folder")):
        fedprior.export(run, tmp_path / to, onnx=False)
    found = [json.loads((tmp_path / to / "model.json").read_text()) for to in ("from-result", "from-folder")]
    assert found[0]["scale"] == found[1]["scale"]
    assert found[0]["scale"]["mean"]
    assert trained(result).module is not result.model


def test_a_personal_model_is_exported_without_its_closed_units(small_task, tmp_path: Path) -> None:
    task = small_task((20, 30, 12), rounds=8)
    sparse = fedprior.algorithm("fedsparse", task.network, lambda0=1e-2, local_threshold_optimiser="Adamax(lr=0.01)")
    fedprior.run(task, sparse, out=tmp_path / "run")
    found = fedprior.export(tmp_path / "run", tmp_path / "own", personalise=1, task=task, onnx=False)
    assert found["client"] == 1
    assert "client 1's own model" in found["title"]
    assert found["units"], "nothing was pruned, so this tests nothing"
    assert found["sizes"]["compact"]["parameters"] < found["sizes"]["dense"]["parameters"]


def test_the_best_model_is_evaluated_and_exported_where_it_was_kept(small_task, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedprior.trained.compact.export_folder.fastest", lambda calls: [1.0] * len(calls))
    task, kept = small_task(rounds=3, evaluate_every=1), {"keep": "best", "by": "sparsity"}
    result = fedprior.run(task, "fedavg", out=tmp_path / "run", **kept)  # of equals the first
    first, _, last = (record["global_loss"] for record in result.records)
    assert first != pytest.approx(last, rel=1e-3)
    for run, given in ((result, {}), (tmp_path / "run", {"task": task})):
        found = fedprior.evaluate(run, best=True, **given)
        assert (found["loss"], found["title"]) == (pytest.approx(first), "own, fedavg, round 1")
        assert (
            fedprior.export(run, tmp_path / type(run).__name__, best=True, onnx=False, **given)["title"]
            == found["title"]
        )
        assert fedprior.evaluate(run, **given)["loss"] == pytest.approx(last)
        with pytest.raises(SettingError, match="choose one of the two"):
            fedprior.evaluate(run, best=True, personalise=1, **given)
    plain = fedprior.run(task, "fedavg", out=tmp_path / "plain")
    for run, given in ((plain, {}), (tmp_path / "plain", {"task": task})):
        with pytest.raises(RunError, match="train with keep=best"):
            fedprior.export(run, tmp_path / "none", best=True, **given)


def test_a_stopped_run_is_exported_as_of_its_last_round(small_task, tmp_path) -> None:
    task, run = small_task(rounds=6, checkpoint_every=1), tmp_path / "run"
    fedprior.run(task, "fedavg", out=run, progress=lambda record: fedprior.STOP)
    assert fedprior.evaluate(run, task=task)["title"] == "own, fedavg, round 1"

    def interrupted(record: dict) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedprior.resume(run, task=task, progress=interrupted)
    found = fedprior.evaluate(run, task=task)
    assert found["title"] == "own, fedavg, round 3"
    assert found["loss"] == pytest.approx(fedprior.evaluate(fedprior.run(task, "fedavg", rounds=3))["loss"])


def test_evaluation_takes_other_data(small_task, tmp_path: Path) -> None:
    task = small_task()
    result = fedprior.run(task, "fedavg")
    x, y = task.data.test_x.numpy(), task.data.test_y.numpy()
    np.savez(tmp_path / "same.npz", x=x, y=y)
    assert fedprior.evaluate(result, data=tmp_path / "same.npz")["accuracy"] == result.summary["global_accuracy"]
    np.savez(tmp_path / "wrong.npz", x=x, y=y + 10)
    with pytest.raises(DataError, match="the network knows 4 classes"):
        fedprior.evaluate(result, data=tmp_path / "wrong.npz")
    np.savez(tmp_path / "pixels.npz", x=np.zeros((2, 8, 8), np.uint8), y=y[:2])
    with pytest.raises(DataError, match="not trained on images"):
        fedprior.evaluate(result, data=tmp_path / "pixels.npz")


def test_what_cannot_be_restored_is_a_clear_error(small_task, tmp_path: Path) -> None:
    task = small_task()
    fedprior.run(task, "fedavg", out=tmp_path / "run")
    with pytest.raises(RunError, match=r"a task of your own, 'own'; export it from Python: export\("):
        fedprior.export(tmp_path / "run", tmp_path / "to")
    with pytest.raises(SettingError, match="clients run from 0 to 5"):
        fedprior.evaluate(tmp_path / "run", task=task, personalise=6)
    model = tmp_path / "run" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    with pytest.raises(RunError, match="damaged"):
        fedprior.evaluate(tmp_path / "run", task=task)
    model.unlink()
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match=r"no checkpoint\.safetensors"):
        fedprior.evaluate(tmp_path / "run", task=task)
    with pytest.raises(RunError, match="not a run"):
        fedprior.evaluate(tmp_path)
