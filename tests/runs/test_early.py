"""Runs that stop early, keep their best model, or are extended."""

import json
import math
import tomllib

import pytest
import safetensors.torch
import torch
from torch import nn

import fedprior
from fedprior import FedpriorError, RunError, SettingError
from fedprior.priors.gaussian import Gaussian
from fedprior.runs import asked
from fedprior.runs.early import best


def evaluated(*values, name="global_accuracy", every=2):
    """Records with an evaluation every other round."""
    records = []
    for value in values:
        records += [{"round": len(records) + i} for i in range(1, every)]
        records.append({"round": len(records) + 1, "sparsity": 0.0, name: value})
    return records


def test_the_best_evaluation():
    assert best([{"round": 1}], "auto") is None
    assert best(evaluated(0.1, 0.3, 0.3, 0.2), "auto") == ("global_accuracy", 4, 0.3, 2)
    assert best(evaluated(3.0, 1.0, 2.0, name="global_loss"), "auto") == ("global_loss", 4, 1.0, 1)
    assert best(evaluated(3.0, 1.0, 2.0, name="global_mae"), "global_mae") == ("global_mae", 2, 3.0, 2)
    assert best(evaluated(3.0, 1.0, 2.0, name="global_mae"), "-global_mae") == ("global_mae", 4, 1.0, 1)
    assert best(evaluated(0.1, math.nan, None, 0.2), "global_accuracy") == ("global_accuracy", 8, 0.2, 0)
    with pytest.raises(SettingError, match="evaluations have no recall; they have sparsity, global_accuracy"):
        best(evaluated(0.1), "recall")


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_patience_ends_a_run_as_its_records_show(small_task, tmp_path):
    """Against an unbroken run with the same numbers: what it would have recorded up to there."""
    settings = {"rounds": 40, "evaluate_every": 2, "local_optimiser": "SGD(lr=0.3)"}
    task = small_task(**{k: v for k, v in settings.items() if k != "local_optimiser"})
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.3)")
    whole = fedprior.run(task, algorithm)
    expected, high, waited = 40, -1.0, 0
    for record in whole.records:
        if "global_accuracy" in record:
            high, waited = (record["global_accuracy"], 0) if record["global_accuracy"] > high else (high, waited + 1)
            if waited == 3:
                expected = record["round"]
                break
    assert expected < 40, "the task is learned before its end"
    stopped = fedprior.run(task, algorithm, out=tmp_path / "run", patience=3)
    assert stopped.records == whole.records[:expected]
    assert stopped.summary["stopped"] == "no better global_accuracy in 3 evaluations"
    assert stopped.summary["rounds"] == expected
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["run"]["patience"] == 3
    # A resumed run finds the same in its records.
    again = fedprior.resume(tmp_path / "run", task=task, algorithm=algorithm)
    assert (again.records, again.summary["stopped"]) == (stopped.records, stopped.summary["stopped"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]


@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
def test_the_best_model_survives_a_restart(small_task, tmp_path, mode):
    task = small_task(rounds=40, evaluate_every=2, mode=mode)
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.3)")
    seen = {}

    def stop(at):
        def progress(record):
            seen[record["round"]] = record.get("global_accuracy", -1.0)
            return fedprior.STOP if record["round"] == at else None

        return progress

    whole = fedprior.run(task, algorithm, out=tmp_path / "whole", keep="best", progress=stop(99))
    top = max(seen, key=lambda number: (seen[number], -number))
    assert whole.summary["best_round"] == top < 40
    assert whole.summary["best_global_accuracy"] == seen[top]
    alone = fedprior.run(task, algorithm, progress=stop(top))
    assert same(weights(whole.best), weights(alone.model))
    assert not same(weights(whole.best), weights(whole.model))
    kept = safetensors.torch.load_file(tmp_path / "whole" / "best.safetensors")
    assert same(kept, weights(alone.model))
    for at in (top - 1, top, top + 1):
        path = tmp_path / f"broken-{at}"
        if at:
            first = fedprior.run(task, algorithm, out=path, keep="best", progress=stop(at))
            assert (len(first.records), first.summary["stopped"]) == (at, "by its callback")
            again = fedprior.resume(path, task=task, algorithm=algorithm)
            assert same(weights(again.best), weights(whole.best))
            assert again.records == whole.records
            assert (path / "best.safetensors").read_bytes() == (tmp_path / "whole" / "best.safetensors").read_bytes()
    assert fedprior.run(task, algorithm, rounds=1).best is None


def test_an_extended_run_equals_one_that_was_longer_from_the_start(small_task, tmp_path):
    task = small_task(rounds=4, evaluate_every=2)
    fedprior.run(task, "fedavg", out=tmp_path / "run")
    with pytest.raises(RunError, match="has 4 rounds already: --rounds must be at least that, got 3"):
        fedprior.resume(tmp_path / "run", task=task, rounds=3)
    for wrong in (0, -1):
        with pytest.raises(SettingError, match=f"rounds must be at least 1, got {wrong}"):
            fedprior.resume(tmp_path / "run", task=task, rounds=wrong)
    assert "rounds = 4" in (tmp_path / "run" / "config.toml").read_text()
    longer = fedprior.resume(tmp_path / "run", task=task, rounds=8)
    fedprior.run(small_task(rounds=8, evaluate_every=2), "fedavg", out=tmp_path / "whole")
    for name in ("config.toml", "rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert longer.summary["rounds"] == 8


@pytest.mark.parametrize(
    ("rounds", "words"), [("many", "rounds must be a whole number"), (6.5, "rounds must be"), (1, "at least")]
)
def test_invalid_extensions_are_refused(small_task, tmp_path, rounds, words):
    task = small_task(rounds=2)
    fedprior.run(task, "fedavg", out=tmp_path / "run")
    with pytest.raises(FedpriorError, match=words):
        fedprior.resume(tmp_path / "run", task=task, rounds=rounds)


def test_impossible_settings_are_refused(small_task):
    for wrong, words in (({"patience": 0}, "patience must be at least 1"), ({"keep": "all"}, "keep must be last or")):
        with pytest.raises(SettingError, match=words):
            fedprior.run(small_task(), "fedavg", **wrong)
    unjudged = fedprior.own_task(nn.Linear(2, 2), [(torch.rand(4, 2), torch.arange(4) % 2)], rounds=1)
    for setting in ({"patience": 1}, {"keep": "best"}, {"keep": "best", "by": "-global_loss"}):
        with pytest.raises(SettingError, match="needs test examples"):
            fedprior.run(unjudged, "fedavg", **setting)
    assert fedprior.run(unjudged, "fedavg", keep="best", by="sparsity").best is not None


@pytest.mark.parametrize("name", ["fedavg", "fedsparse", "fednarrow"])
def test_every_number_of_the_records_can_judge_and_no_other(small_task, name):
    """Against the records of a run. What is known before training begins with the round, unlike what records show."""
    task = small_task(rounds=1)
    settings = {"unseen": 0.25, "keep": "best", "clients_per_round": 2}
    (record,) = fedprior.run(task, name, **settings).records
    fields = [key for key, value in record.items() if isinstance(value, int | float)]
    assert {"unseen_loss", "newcomer_accuracy", "global_accuracy_worst", "local_loss_spread", "sparsity"} < {*fields}
    for field in fields:
        asked.assemble(task, name, {**settings, "by": field})
        asked.assemble(task, name, {**settings, "by": f"-{field}"})
    for wrong in ("recall", "-recall", "global", "accuracy", "unseen_recall", "faults"):
        with pytest.raises(
            SettingError, match=f"by={wrong}: evaluations have no {wrong.removeprefix('-')}; they have round"
        ):
            fedprior.run(task, name, **settings, by=wrong)
    with pytest.raises(SettingError, match=r"evaluations have no unseen_loss; they have round, .*local_loss_worst"):
        fedprior.run(task, name, patience=1, by="unseen_loss")
    with pytest.raises(SettingError, match="evaluations have no units/none; they have train_loss"):  # only records know
        fedprior.run(task, name, **settings, by="units/none")


def test_a_run_of_a_field_that_does_not_exist_leaves_no_folder(small_task, tmp_path):
    with pytest.raises(SettingError, match="evaluations have no foo"):
        fedprior.run(small_task(), "fedavg", patience=1, by="foo", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_prior_of_ones_own_counts_can_judge(small_task):
    class Counting(Gaussian):
        def tally(self, server):
            return {"centres": 1}

    task = small_task(rounds=1)
    own = fedprior.Algorithm(Counting(), local={"weights": fedprior.Optimiser("SGD", {"lr": 0.1})})
    assert fedprior.run(task, own, keep="best", by="centres").summary["best_centres"] == 1
    with pytest.raises(SettingError, match="evaluations have no centre;"):
        fedprior.run(task, own, keep="best", by="centre")
