"""The paper's experiments as data: they hang together with the tasks, and with one another."""

import re

import pytest
import torch

from fedprior.catalogue.models import LeNet5, ResNet20
from fedprior.catalogue.tasks import task
from fedprior.core.errors import SettingError
from fedprior_experiments.reproduce import EXPERIMENTS, Cells, experiment, plan, read_seeds

FIXED = {"partition_seed": 0}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_has_valid_settings_and_its_own_folder(name, tmp_path):
    specs = plan(experiment(name), [0, 1, 2], tmp_path, {})
    folders = {spec.out for spec in specs}
    assert len(folders) == len(specs) == 3 * len(experiment(name).methods)
    for spec in specs:
        assert re.fullmatch(r"[a-z0-9+-]+", spec.label)
        assert spec.out == tmp_path / spec.label / f"seed-{spec.seed}"
        assert spec.config()["run"]["seed"] == spec.seed


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("cifar10", LeNet5(channels=3, side=32, classes=10)),
        ("cifar100", ResNet20(channels=3, classes=100)),
        ("femnist", LeNet5(channels=1, side=28, classes=62)),
    ],
)
def test_the_papers_gigabytes_of_fedavg_follow_from_the_network_and_the_rounds(name, model):
    """Rounds × 10 clients × 2 directions × 4 bytes per parameter, to the paper's whole number."""
    chosen = experiment(name)
    paper = chosen.methods[0].paper
    parameters = sum(p.numel() for p in model.parameters())
    assert round(chosen.rounds * 10 * 2 * 4 * parameters / 2**30) == paper.gib.mean


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "femnist"])
def test_more_pressure_means_fewer_bytes_and_more_sparsity_in_the_paper(name):
    rows = {method.label: method.paper for method in experiment(name).methods}
    levels = [rows[f"fedsparse-{level}"] for level in ("low", "mid", "high")]
    settings = {method.label: method.settings for method in experiment(name).methods}
    strengths = [settings[f"fedsparse-{level}"]["lambda0"] for level in ("low", "mid", "high")]
    assert [row.sparsity.mean for row in levels] == sorted(row.sparsity.mean for row in levels)
    assert [row.gib.mean for row in levels] == sorted((row.gib.mean for row in levels), reverse=True)
    assert strengths == sorted(strengths)
    for level, row in zip(("low", "mid", "high"), levels, strict=True):  # asked for what the paper had
        assert settings[f"fednarrow-{level}"]["sparsity"] == pytest.approx(row.sparsity.mean / 100)
        assert rows[f"fednarrow-{level}"] == Cells()  # not in the paper


def test_all_seeds_may_share_one_partition():
    one, other, own = (task("mnist-mini", seed=seed, **chosen) for seed, chosen in ((1, FIXED), (2, FIXED), (2, {})))
    assert one.data.fingerprint() == other.data.fingerprint() != own.data.fingerprint()
    assert task("mnist-mini", seed=0).data.fingerprint() == one.data.fingerprint()
    weights = [next(iter(found.network.params().values())) for found in (one, other, own)]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


def test_with_and_without_server_pruning_differ_in_nothing_else():
    methods = {method.label: method for method in experiment("cifar10").methods}
    pruned, unpruned = (methods[label] for label in experiment("cifar10").pruning)
    assert unpruned.settings == {**pruned.settings, "prune_server": False}


def test_methods_can_be_chosen_and_stay_in_order():
    chosen = experiment("cifar10").chosen(["fedsparse-mid", "fedavg"])
    assert [method.label for method in chosen.methods] == ["fedavg", "fedsparse-mid"]
    with pytest.raises(SettingError, match="did you mean 'fedsparse-mid'"):
        experiment("cifar10").chosen(["fedsparse-mit"])
    with pytest.raises(SettingError, match="names no method"):
        experiment("cifar10").chosen([])
    with pytest.raises(SettingError, match="did you mean 'cifar10'"):
        experiment("cifar")


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1,1", "1,x", ","])
def test_invalid_seeds_are_refused(text):
    with pytest.raises(SettingError, match="--seeds takes how many"):
        read_seeds(text)


def test_given_settings_reach_the_methods_that_know_them(tmp_path):
    specs = plan(
        experiment("cifar10"), [4], tmp_path, {"lambda0": "1", "batch_size": "8", "alpha": "0.5", "rounds": "2"}
    )
    for spec in specs:
        assert (spec.run["batch_size"], spec.run["rounds"]) == ("8", "2")
        assert spec.task_options == {"alpha": "0.5", "pixels": "symmetric", **FIXED}
        assert (spec.algorithm_settings.get("lambda0") == "1") == (spec.algorithm == "fedsparse")
    for given, match in (
        ({"lambda1": "1"}, "did you mean 'lambda0'"),
        ({"seed": "1"}, "--seeds"),
        ({"rounds": "0"}, "rounds must be at least 1"),
        ({"alpha": "big"}, "alpha must be a number"),
        ({"lambda0": "big"}, "lambda0 must be a number"),
    ):
        with pytest.raises(SettingError, match=match):
            plan(experiment("cifar10"), [0], tmp_path, given)
