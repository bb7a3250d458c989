"""The Python API, and what a run leaves on disk."""

import hashlib
import json
import shutil
import tomllib
from unittest.mock import ANY

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedprior
from fedprior import RunError, SettingError
from fedprior.report.records import read_run
from fedprior.runs.folder import to_toml
from fedprior.runs.repeat import repeat_command


@pytest.fixture
def finished(small_task, tmp_path):
    """A finished run of FedSparse and its folder."""
    task = small_task()
    algorithm = fedprior.algorithm("fedsparse", task.network, lambda0=1e-3)
    return fedprior.run(task, algorithm, out=tmp_path / "run", label="fedsparse-high", seed=9)


# ---------------------------------------------------------------------- the folder


def test_the_folder_has_every_file_of_a_run(finished):
    names = {path.name for path in finished.path.iterdir()}
    records = {"config.toml", "partition.json", "rounds.jsonl", "times.jsonl", "summary.json", "clients.bin"}
    assert names == records | {"model.safetensors", "checkpoint.safetensors", "checkpoints"}


def test_rounds_has_one_line_per_round_with_all_its_fields(finished):
    text = (finished.path / "rounds.jsonl").read_text()
    assert text.endswith("\n")
    records = [json.loads(line) for line in text.splitlines()]
    assert records == finished.records
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
    always = {"round", "bytes_up", "bytes_down", "train_loss"}
    evaluated = {"global_accuracy", "local_accuracy", "sparsity", "tv_mean", "tv_max"}
    losses = {f"{where}_{name}" for where in ("global", "local") for name in ("loss", "nll", "ece", "brier")}
    losses |= {
        f"{where}_{name}_{what}"
        for where in ("global", "local")
        for name in ("loss", "accuracy")
        for what in ("worst", "spread")
    }
    losses |= {f"{name}/{number}" for name in ("confidence", "accuracy") for number in range(1, 16)}
    for record in records:
        expected = always | evaluated | losses if record["round"] in (2, 4, 5) else always
        layers = {f"sparsity/{name}" for name in ("conv", "fc1", "fc2")}
        counts = {name for name in record if name.startswith(("units/", "closed_by_"))}
        assert len(counts) == (3 * 2 if expected > always else 0)
        assert set(record) - {"floored"} - layers - counts == expected
        assert layers <= set(record) or record.get("sparsity", 0) == 0
        assert isinstance(record["bytes_up"], int)
        assert isinstance(record["bytes_down"], int)
        assert record["train_loss"] > 0
        assert all(0 <= record[name] <= 1 for name in expected & evaluated)
        assert record.get("tv_mean", 0) <= record.get("tv_max", 0)


def test_a_layers_sparsity_is_the_removed_share_of_its_weights(finished):
    weights = safetensors.torch.load_file(finished.path / "model.safetensors")
    last = finished.records[-1]
    assert last["sparsity"] > 0, "nothing was pruned, so this tests nothing"
    for layer in ("conv", "fc1", "fc2"):
        assert last[f"sparsity/{layer}"] == pytest.approx(float((weights[f"{layer}.weight"] == 0).double().mean()))


def test_times_are_kept_separately_and_add_up(finished):
    times = [json.loads(line) for line in (finished.path / "times.jsonl").read_text().splitlines()]
    assert [line["round"] for line in times] == [1, 2, 3, 4, 5]
    assert all(line["seconds"] > 0 for line in times)
    assert sum(line["seconds"] for line in times) == pytest.approx(finished.summary["seconds"], abs=0.01)


def test_summary_has_every_field_with_accuracies_and_sparsity_as_fractions(finished):
    summary = json.loads((finished.path / "summary.json").read_text())
    assert summary == finished.summary
    names = "task algorithm label seed rounds global_accuracy local_accuracy bytes_up bytes_down sparsity parameters"
    names += " global_accuracy_late local_accuracy_late"
    assert {*names.split(), "effective_parameters", "seconds", "device", "version"} <= set(summary)
    assert (summary["task"], summary["algorithm"], summary["label"]) == ("own", "fedsparse", "fedsparse-high")
    assert (summary["seed"], summary["rounds"], summary["device"]) == (9, 5, "cpu")
    assert summary["version"] == fedprior.__version__
    for name in ("global_accuracy", "local_accuracy", "sparsity"):
        assert 0 <= summary[name] <= 1
        assert summary[name] == finished.records[-1][name]
    for name in ("bytes_up", "bytes_down"):
        assert summary[name] == sum(record[name] for record in finished.records)
    assert summary["parameters"] == 40 + 444 + 52
    assert summary["sparsity"] == pytest.approx(1 - summary["effective_parameters"] / 536)
    assert summary["seconds"] > 0


def test_the_model_file_is_the_model(finished, small_task):
    tensors = safetensors.torch.load_file(finished.path / "model.safetensors")
    model = small_task().network.module
    model.load_state_dict(tensors)
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(model(x), finished.model(x))
    assert not finished.model.training


def test_the_config_is_complete(finished):
    config = tomllib.loads((finished.path / "config.toml").read_text())
    assert config["run"]["seed"] == 9
    assert config["run"]["batch_size"] == 4
    assert config["run"]["label"] == "fedsparse-high"
    assert config["algorithm"]["lambda0"] == 1e-3
    assert config["algorithm"]["local_optimiser"] == "SGD(lr=0.05)"
    assert config["made"] == {"fedprior": fedprior.__version__, "torch": torch.__version__}


@pytest.mark.parametrize("name", fedprior.ALGORITHMS)
def test_a_run_repeated_from_its_config_gives_the_same_records(small_task, tmp_path, name):
    first = fedprior.run(small_task(), name, out=tmp_path / "first", rounds=3, seed=2, local_steps=3)
    config = tomllib.loads((tmp_path / "first" / "config.toml").read_text())
    task = small_task()
    settings = {key: value for key, value in config["run"].items() if key not in ("task", "algorithm", "label")}
    algorithm = fedprior.algorithm(config["run"]["algorithm"], task.network, **config["algorithm"])
    again = fedprior.run(task, algorithm, out=tmp_path / "again", label=config["run"]["label"], **settings)
    assert again.records == first.records
    assert (tmp_path / "again" / "config.toml").read_bytes() == (tmp_path / "first" / "config.toml").read_bytes()
    model = (tmp_path / "first" / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == model


def test_the_partition_is_kept_with_the_run(finished, small_task):
    data = small_task().data
    held = json.loads((finished.path / "partition.json").read_text())
    for name, labels, shards in (("train", data.y, data.train), ("test", data.test_y, data.test)):
        naive = [[int((labels[shards[s]] == c).sum()) for c in range(4)] for s in range(6)]
        assert held[name] == naive
    config = tomllib.loads((finished.path / "config.toml").read_text())
    rows = [shards[s].tolist() for shards in (data.train, data.test) for s in range(6)]
    text = ";".join(",".join(map(str, part)) for part in rows)
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert held["fingerprint"] == config["partition"]["fingerprint"] == finished.summary["partition"] == expected
    assert (held["classes"], config["partition"]["clients"]) == (4, 6)


def test_targets_that_are_not_labels_are_counted_as_examples(tmp_path):
    clients = [(torch.ones(n, 3), torch.ones(n, 1)) for n in (2, 5)]
    task = fedprior.own_task(nn.Linear(3, 1), clients, loss=lambda out, y: ((out - y) ** 2).mean(1))
    fedprior.run(task, "fedavg", rounds=1, out=tmp_path / "run")
    held = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert (held["classes"], held["train"], held["test"]) == (0, [[2], [5]], [[0], [0]])


def test_a_run_is_not_resumed_on_another_partition(small_task, finished):
    before = {path.name: path.read_bytes() for path in finished.path.rglob("*.*")}
    with pytest.raises(RunError, match=r"was trained on the partition .*: the data or task has changed"):
        fedprior.resume(finished.path, task=small_task((5, 11, 2, 8, 9, 4)))
    assert {path.name: path.read_bytes() for path in finished.path.rglob("*.*")} == before


def test_a_task_of_another_seed_than_its_run_is_found_again(tmp_path):
    """One partition and start, several runs on it: the folder must lead back to them, whatever the run's seed."""
    task = fedprior.task("mnist-mini", seed=0, clients=50)
    small = {"rounds": 1, "clients_per_round": 2, "device": "cpu"}
    result = fedprior.run(task, "fedavg", seed=3, out=tmp_path / "run", **small)
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["run"]["seed"], config["task"]["seed"]) == (3, 0)
    assert fedprior.resume(tmp_path / "run").summary == result.summary | {"seconds": ANY}
    own = [fedprior.evaluate(run, personalise=5) for run in (result, tmp_path / "run")]
    assert own[0] == own[1]
    first, then = repeat_command(read_run(tmp_path / "run")).split("; ")
    known = {"fedprior": fedprior}
    exec(first, known)
    assert eval(then, known).records == result.records
    alone = fedprior.run(fedprior.task("mnist-mini", seed=2, clients=50), "fedavg", **small)
    assert alone.summary["seed"] == 2


plain = st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain | st.lists(st.text(), max_size=3)))
def test_any_setting_survives_toml(values):
    assert tomllib.loads(to_toml({"run": values, "empty": {}}).encode().decode()) == {"run": values, "empty": {}}


@pytest.mark.parametrize("label", ["📉 high", 'a "quoted" \\ label', "two\nlines", "del\x7f"])
def test_any_label_survives_a_resume(small_task, tmp_path, label):
    fedprior.run(small_task(), "fedavg", out=tmp_path / "run", label=label, rounds=1)
    assert fedprior.resume(tmp_path / "run", task=small_task()).summary["label"] == label


def test_missing_numbers_are_null_in_the_files(small_task, tmp_path):
    task = small_task(test_sizes=(0,) * 6)
    fedprior.run(task, "fedavg", out=tmp_path / "run", rounds=1)
    for line in ((tmp_path / "run" / name).read_text() for name in ("rounds.jsonl", "summary.json")):
        values = json.loads(line, parse_constant=pytest.fail)
        assert values["global_accuracy"] is None
        assert values["local_accuracy"] is None


# ---------------------------------------------------------------------- a folder that exists


def test_a_run_folder_is_never_overwritten(small_task, finished, tmp_path):
    before = {path.name: path.read_bytes() for path in finished.path.rglob("*.*")}
    with pytest.raises(RunError, match=r"exists; continue it with `fedprior resume .*run`, or choose another"):
        fedprior.run(small_task(), "fedavg", out=finished.path)
    assert {path.name: path.read_bytes() for path in finished.path.rglob("*.*")} == before
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(RunError, match=r"exists; .*choose another folder"):
            fedprior.run(small_task(), "fedavg", out=path)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_impossible_run_folder_is_a_one_line_error(small_task, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(RunError, match="cannot") as caught:
            fedprior.run(small_task(), "fedavg", out=path)
        assert "\n" not in str(caught.value)


def test_an_empty_folder_may_be_used(small_task, tmp_path):
    assert fedprior.run(small_task(), "fedavg", out=tmp_path, rounds=1).path == tmp_path


# ---------------------------------------------------------------------- the Python API


def test_a_users_model_learns_on_the_users_clients(small_task, tmp_path):
    task = small_task((30,) * 6, test_sizes=(10,) * 6)
    untouched = {name: value.clone() for name, value in task.network.module.state_dict().items()}
    settings = {"rounds": 12, "clients_per_round": 6, "epochs": 2, "batch_size": 6}
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.1)")
    result = fedprior.run(task, algorithm, **settings)
    assert result.summary["global_accuracy"] > 0.9
    assert result.path is None
    assert isinstance(result.model, nn.Module)
    # The task is as it was, so that the next algorithm starts where this one started.
    for name, value in task.network.module.state_dict().items():
        assert torch.equal(value, untouched[name])
    again = fedprior.run(task, algorithm, **settings)
    assert again.records == result.records


def test_settings_of_a_run_override_those_of_its_task(small_task):
    assert fedprior.run(small_task(rounds=4), "fedavg").summary["rounds"] == 4
    assert fedprior.run(small_task(rounds=4), "fedavg", rounds=2).summary["rounds"] == 2
    assert fedprior.run(small_task(), "fedavg", rounds="2").summary["rounds"] == 2


def test_few_clients_make_small_cohorts_by_default():
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    task = fedprior.own_task(nn.Linear(3, 2), [(x[:4], y[:4]), (x[4:], y[4:])])
    assert fedprior.run(task, "fedavg", rounds=1).simulation.settings.clients_per_round == 2


def test_frozen_parameters_do_not_change(small_task):
    task = small_task()
    task.network.module.conv.requires_grad_(False)
    before = task.network.module.conv.weight.clone()
    result = fedprior.run(task, "fedavg")
    assert result.summary["parameters"] == 444 + 52
    assert torch.equal(result.model.conv.weight, before)
    assert not torch.equal(result.model.fc1.weight, task.network.module.fc1.weight)


def test_a_task_given_by_name_is_the_same_task(monkeypatch, small_task):
    monkeypatch.setitem(fedprior.TASKS, "tiny", lambda seed, *, size=5: small_task((size,) * 4))
    by_name, built = fedprior.run("tiny", "fedavg", seed="3"), fedprior.run(fedprior.task("tiny"), "fedavg", seed=3)
    assert by_name.records == built.records


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": 2.5}, "rounds must be a whole number, got 2.5"),
        ({"rounds": True}, "rounds must be a whole number, got True"),
        ({"rounds": "ten"}, "rounds must be a whole number, got 'ten'"),
        ({"epochs": -1}, "epochs must be at least 1"),
        ({"local_steps": 0}, "local_steps must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
        ({"mode": "sideways"}, "mode must be auto, in-turn, vectorised or captured, got 'sideways'"),
        ({"messages": "pigeon"}, "messages must be auto, encode or count, got 'pigeon'"),
        (
            {"wire": "int5"},
            "wire must be float32, float16, bfloat16, int8, int4, or two of them as DOWN/UP, got 'int5'",
        ),
        ({"wire": "int8/"}, "wire must be .* got 'int8/'"),
        ({"wire": "int8/int4/int2"}, "wire must be .* got 'int8/int4/int2'"),
        ({"wire": "count"}, "did you mean messages=count"),
        ({"entropy": "often"}, "entropy must be true or false, got 'often'"),
        ({"device": "abacus"}, "device 'abacus' is not available"),
        ({"clients_per_round": 7}, "clients_per_round is 7, but there are only 6 clients"),
        (
            {"attackers": 0.5},
            "attackers=0.5 has no effect: there is no attack; give attack=sign-flip, scale, constant or backdoor",
        ),
        ({"attack": "scale", "attackers": 0.05}, "attackers=0.05 has no effect: of 6 clients that is none"),
        ({"round": 3}, "unknown setting of a run 'round'; did you mean 'rounds'"),
    ],
)
def test_settings_of_the_wrong_type_or_range_are_refused_before_anything_is_written(small_task, tmp_path, given, match):
    with pytest.raises(SettingError, match=match) as caught:
        fedprior.run(small_task(), "fedavg", out=tmp_path / "run", **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("fedvag", {}, "unknown algorithm 'fedvag'; did you mean 'fedavg'"),
        ("xyzzy", {}, "unknown algorithm 'xyzzy'; there are .*fedavg"),
        ("fedprox", {"precison": 1}, "unknown setting of fedprox 'precison'; did you mean 'precision'"),
        ("fedprox", {"precision": -1}, "precision must be at least 0, got -1"),
        ("fedprox", {"precision": "high"}, "precision must be a number, got 'high'"),
        ("fedprox", {"precision": float("nan")}, "precision must be a number, got nan"),
        ("fedprox", {"precision": "inf"}, "precision must be a number, got 'inf'"),
        ("fedsparse", {"lambda0": -1}, "lambda0 must be at least 0"),
        ("fedsparse", {"temperature": 0}, "temperature must be above 0"),
        ("fedsparse", {"prune_below": 1.5}, "prune_below must lie between 0 and 1"),
        ("fedsparse", {"structured": "maybe"}, "structured must be true or false, got 'maybe'"),
        ("fedsparse", {"floor": 0}, "floor must be at least 1"),
        ("fedsparse", {"sparsity": 0.5}, "fedsparse takes no size: .* take fedsparse-sized, .* or fednarrow, "),
        ("fedsparse+scaffold", {"max_parameters": 9}, "fedsparse.scaffold takes no size: .* or fednarrow.scaffold, "),
        ("fedsparse", {"average": True}, "unknown setting of fedsparse 'average'"),
        ("fednarrow", {"lambda0": 1e-6}, "unknown setting of fednarrow 'lambda0'"),
        ("fedsparse-unstructured", {"ungated": ("conv",)}, "ungated=conv has no effect: it concerns units"),
        ("fedsparse-unstructured", {"gate_output": True}, "gate_output=true has no effect: it concerns units"),
        ("feddrop", {"precision": -1}, "precision must be at least 0, got -1"),
        ("scaffold", {"local_optimiser": "Adam(lr=0.1)"}, "SCAFFOLD derives gradients from the steps of plain SGD"),
        ("fedavg", {"local_optimiser": "SDG(lr=1)"}, "torch.optim has no optimiser 'SDG'"),
        ("fedavg", {"local_optimiser": "SGD(lr=-1)"}, "Invalid learning rate: -1"),
        ("fedavg", {"local_optimiser": "SGD(rate=1)"}, "rate"),
        ("fedavg", {"local_optimiser": "SGD(0.1)"}, "an optimiser is written like SGD"),
        ("fedavg", {"local_optimiser": "import os"}, "an optimiser is written like SGD"),
        ("fedavg", {"local_optimiser": "LBFGS"}, "LBFGS cannot be used here"),
    ],
)
def test_settings_of_an_algorithm_are_checked(small_task, name, given, match):
    with pytest.raises(SettingError, match=match) as caught:
        fedprior.algorithm(name, small_task().network, **given)
    assert "\n" not in str(caught.value)


def test_an_unknown_task_suggests_the_nearest():
    with pytest.raises(SettingError, match="unknown task 'mnist-mimi'; did you mean 'mnist-mini'"):
        fedprior.task("mnist-mimi")
    with pytest.raises(SettingError, match="did you mean 'alpha'"):
        fedprior.task("mnist-mini", aplha=1)


def test_a_folder_from_before_fednarrow_was_renamed_is_a_one_line_error(finished, small_task):
    config = finished.path / "config.toml"
    old = 'sparsity = SIZE\nmax_parameters = "none"\nshrink = "none"\nlinear_rate = 0.5\n'
    text = config.read_text().replace("dense_rounds = 0\n", f'dense_rounds = "none"\n{old}')
    assert "SIZE" in text
    config.write_text(text.replace("SIZE", "0.8"))
    with pytest.raises(RunError, match="today's fednarrow") as error:
        fedprior.resume(finished.path, task=small_task())
    assert "\n" not in str(error.value)
    config.write_text(text.replace("SIZE", '"none"'))  # by λ₀, where those settings had no effect
    assert fedprior.resume(finished.path, task=small_task()).records == finished.records


def test_an_own_task_cannot_be_resumed_by_name(finished):
    with pytest.raises(RunError, match=r"trained a task of your own, 'own'; resume it from Python: resume\(.*task=…\)"):
        fedprior.resume(finished.path)


def test_an_own_algorithm_can_be_resumed_if_given_again(small_task, tmp_path):
    def own(task):
        return fedprior.Algorithm(
            fedprior.algorithm("fedprox", task.network).prior, {"weights": fedprior.Optimiser("SGD")}
        )

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    task = small_task()
    whole = fedprior.run(task, own(task), out=tmp_path / "whole")
    assert whole.summary["algorithm"] == whole.summary["label"] == "own"
    with pytest.raises(KeyboardInterrupt):
        fedprior.run(task, own(task), out=tmp_path / "run", progress=stop, checkpoint_every=1)
    with pytest.raises(
        RunError, match=r"used an algorithm of your own; sample it from Python: posterior\(.*algorithm=…"
    ):
        fedprior.posterior(tmp_path / "run", task=task)
    with pytest.raises(RunError, match=r"used an algorithm of your own; resume it from Python: .*algorithm=…"):
        fedprior.resume(tmp_path / "run", task=task)
    assert fedprior.resume(tmp_path / "run", task=task, algorithm=own(task)).records == whole.records


def test_another_runs_checkpoint_is_refused_even_with_the_same_seed(tmp_path):
    """Copied over, it would mix two runs: its records are not those in the folder."""
    for name, rate in (("a", 0.05), ("b", 0.2)):
        task = fedprior.task("mnist-mini", clients=200)
        chosen = fedprior.algorithm("fedavg", task.network, local_optimiser=f"SGD(lr={rate})")
        fedprior.run(task, chosen, rounds=2, clients_per_round=2, out=tmp_path / name)
    shutil.copy(tmp_path / "b" / "checkpoint.safetensors", tmp_path / "a" / "checkpoint.safetensors")
    before = (tmp_path / "a" / "rounds.jsonl").read_bytes()
    with pytest.raises(fedprior.RunError, match="does not belong to the records"):
        fedprior.resume(tmp_path / "a")
    assert (tmp_path / "a" / "rounds.jsonl").read_bytes() == before
