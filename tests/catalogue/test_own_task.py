"""Own tasks other than image classification: what is measured, in every engine."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprior
from fedprior import DataError, ModelError, SettingError
from fedprior.report import summary_table
from fedprior.report.records import read_run
from fedprior.report.run_tables import numbers_of_runs, table_of_runs

MODES = ("in-turn", "vectorised")
QUICK = {"rounds": 2, "clients_per_round": 3, "batch_size": 4, "evaluate_every": 1, "device": "cpu"}


def generator():
    return torch.Generator().manual_seed(3)


def regression(targets=1):
    draw = generator()
    weights = torch.randn(3, targets, generator=draw, dtype=torch.float64)

    def part(count):
        x = torch.randn(count, 3, generator=draw, dtype=torch.float64)
        return x, x @ weights + 0.1 * torch.randn(count, targets, generator=draw, dtype=torch.float64)

    return [(*part(5 + i), *part(2 + i)) for i in range(4)]


def seeded(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double()


def absolute(outputs, targets):
    """A mean over the examples."""
    return (outputs - targets).abs().mean()


def largest(outputs, targets):
    """One number per example."""
    return (outputs - targets).abs().amax(1)


def everyone(clients):
    return torch.cat([c[2] for c in clients]), torch.cat([c[3] for c in clients])


# ---------------------------------------------------------------------- regression


@pytest.mark.parametrize("mode", MODES)
def test_a_regression_has_a_held_out_loss_and_own_metrics_but_no_accuracy(mode):
    clients = regression(2)
    task = fedprior.own_task(
        seeded(lambda: nn.Linear(3, 2)),
        clients,
        loss=nn.MSELoss(reduction="none"),
        metrics={"mae": absolute, "worst": largest},
        **QUICK,
    )
    result = fedprior.run(task, "fedavg", mode=mode, clients_per_round=4)
    x, y = everyone(clients)
    with torch.no_grad():
        outputs = result.model(x)
    truth = {"loss": F.mse_loss(outputs, y), "mae": F.l1_loss(outputs, y), "worst": (outputs - y).abs().amax(1).mean()}
    for record in (result.records[-1], result.summary):
        assert not {"global_accuracy", "local_accuracy"} & record.keys()
        assert {f"global_{name}": record[f"global_{name}"] for name in truth} == pytest.approx(
            {f"global_{name}": float(value) for name, value in truth.items()}, rel=1e-12
        )
        assert all(math.isfinite(record[f"local_{name}"]) for name in truth)


def test_local_scores_are_means_over_the_models_that_clients_last_sent():
    """With one local step of rate zero everybody sends the model it got, so the truth needs no training."""
    clients = regression()
    module = seeded(lambda: nn.Linear(3, 1))
    task = fedprior.own_task(
        module, clients, loss=lambda o, y: (o - y).square()[:, 0], metrics={"mae": absolute}, **QUICK
    )
    algorithm = fedprior.algorithm("fedavg", task.network, local_optimiser="SGD(lr=0.0)")
    expected = {
        "local_loss": sum(float(F.mse_loss(module(c[2]), c[3]).detach()) for c in clients) / 4,
        "local_mae": sum(float(F.l1_loss(module(c[2]), c[3]).detach()) for c in clients) / 4,
    }
    for mode in MODES:
        found = fedprior.run(task, algorithm, mode=mode, rounds=1, clients_per_round=4).summary
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_a_single_logit_has_no_accuracy_but_may_have_it_as_a_metric():
    draw = generator()
    x = torch.randn(40, 3, generator=draw)
    y = (x[:, 0] > 0).long()
    clients = [(x[i : i + 7], y[i : i + 7], x[i + 7 : i + 10], y[i + 7 : i + 10]) for i in range(0, 40, 10)]

    def bce(outputs, targets):
        return F.binary_cross_entropy_with_logits(outputs[:, 0], targets.float(), reduction="none")

    def hits(outputs, targets):
        return ((outputs[:, 0] > 0) == (targets == 1)).float()

    task = fedprior.own_task(nn.Linear(3, 1), clients, loss=bce, metrics={"hits": hits}, **QUICK)
    for mode in MODES:
        summary = fedprior.run(task, "fedavg", mode=mode).summary
        assert not {"global_accuracy", "local_accuracy"} & summary.keys()
        assert 0 <= summary["global_hits"] <= 1
        assert summary["global_loss"] > 0


def test_integers_that_are_not_classes_train_with_an_own_loss():
    """Counts beyond the outputs, and signs: both were refused as labels, or would have been counted by class."""
    x = torch.randn(12, 3, generator=generator())
    counts, signs = torch.arange(12) * 10**9, torch.tensor([-1, 1] * 6)
    for y in (counts, signs):
        clients = [(x[:6], y[:6], x[:3], y[:3]), (x[6:], y[6:], x[6:], y[6:])]
        task = fedprior.own_task(
            nn.Linear(3, 2), clients, loss=lambda o, y: (o[:, 0] * y.sign() - 1).square(), rounds=1
        )
        assert task.data.classes == 0
        assert "global_accuracy" not in fedprior.run(task, "fedavg").summary


def test_labels_with_an_own_loss_keep_their_accuracy():
    x = torch.randn(30, 3, generator=generator())
    y = x.argmax(1)
    clients = [(x[i : i + 6], y[i : i + 6], x[i + 6 : i + 10], y[i + 6 : i + 10]) for i in (0, 10, 20)]
    smooth = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)
    task = fedprior.own_task(nn.Linear(3, 3), clients, loss=smooth, **QUICK)
    result = fedprior.run(task, "fedavg")
    test_x, test_y = everyone(clients)
    assert result.summary["global_accuracy"] == float((result.model(test_x).argmax(1) == test_y).double().mean())


# ---------------------------------------------------------------------- sequences


class Tokens(nn.Module):
    """The next of 7 tokens; logits last, or after the batch as torch's loss has them."""

    def __init__(self, last=True):
        super().__init__()
        self.embed, self.out, self.last = nn.Embedding(7, 6), nn.Linear(6, 7), last

    def forward(self, x):
        logits = self.out(self.embed(x))
        return logits if self.last else logits.transpose(1, 2)


def sequences(length=5, ignored=False):
    draw = generator()

    def part(count):
        x = torch.randint(7, (count, length), generator=draw)
        y = (x + 1) % 7
        return x, torch.where(torch.rand(count, length, generator=draw) < 0.3, -100, y) if ignored else y

    return [(*part(6 + i), *part(3 + i)) for i in range(4)]


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_sequences_have_the_mean_loss_and_accuracy_of_their_positions(mode, last, ignored):
    clients = sequences(ignored=ignored)
    result = fedprior.run(fedprior.own_task(seeded(lambda: Tokens(last)), clients, **QUICK), "fedavg", mode=mode)
    x, y = everyone(clients)
    with torch.no_grad():
        logits = result.model(x) if last else result.model(x).transpose(1, 2)
    losses, rights = [], []
    for one, targets in zip(logits, y, strict=True):  # a sequence counts as much as another, however long
        kept = targets != -100
        losses.append(float(F.cross_entropy(one[kept], targets[kept])) if kept.any() else 0.0)
        rights.append(float((one[kept].argmax(1) == targets[kept]).double().mean()) if kept.any() else 0.0)
    assert result.summary["global_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert result.summary["global_accuracy"] == pytest.approx(sum(rights) / len(rights), rel=1e-12)
    assert result.summary["local_loss"] < 3
    assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]


def test_a_language_models_loss_may_give_one_number_per_token():
    def tokens(outputs, targets):
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")

    task = fedprior.own_task(seeded(Tokens), sequences(), loss=tokens, **QUICK)
    usual = fedprior.own_task(seeded(Tokens), sequences(), **QUICK)
    assert fedprior.run(task, "fedavg").summary["global_loss"] == pytest.approx(
        fedprior.run(usual, "fedavg").summary["global_loss"], rel=1e-12
    )


def test_ambiguous_sequences_have_no_accuracy_and_need_an_own_loss():
    clients = sequences(length=7)
    with pytest.raises(ModelError, match="the outputs are ambiguous: give your own loss"):
        fedprior.own_task(seeded(Tokens), clients)
    task = fedprior.own_task(
        seeded(Tokens), clients, loss=lambda o, y: F.cross_entropy(o.mT, y, reduction="none"), **QUICK
    )
    assert "global_accuracy" not in fedprior.run(task, "fedavg").summary


def test_targets_beyond_the_logits_of_a_sequence_are_refused():
    x, y, *_ = sequences()[0]
    with pytest.raises(DataError, match="classes for which the model has logits"):
        fedprior.own_task(seeded(Tokens), [(x, y + 3)])


# ---------------------------------------------------------------------- several models, resume, reports


@pytest.mark.parametrize("mode", MODES)
def test_several_models_predict_a_regression_by_their_mean(mode):
    clients = regression()
    task = fedprior.own_task(seeded(lambda: nn.Linear(3, 1)), clients, loss=nn.MSELoss(reduction="none"), **QUICK)
    result = fedprior.run(task, "fedmix", mode=mode)
    x, y = everyone(clients)
    members = [member(x) for member in result.model.members]
    assert len(members) > 1
    truth = F.mse_loss(torch.stack(members).mean(0), y)
    assert result.summary["global_loss"] == pytest.approx(float(truth.detach()), rel=1e-12)
    assert torch.allclose(result.model(x), torch.stack(members).mean(0))


def test_a_resumed_run_has_the_scores_of_an_unbroken_one(tmp_path):
    clients = regression()

    def task(rounds):
        model = seeded(lambda: nn.Linear(3, 1))
        metrics = {"mae": absolute}
        return fedprior.own_task(
            model, clients, loss=nn.MSELoss(reduction="none"), metrics=metrics, **{**QUICK, "rounds": rounds}
        )

    whole = fedprior.run(task(4), "fedavg")
    fedprior.run(task(2), "fedavg", out=tmp_path / "run")
    text = (tmp_path / "run" / "config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (tmp_path / "run" / "config.toml").write_text(text)
    assert fedprior.resume(tmp_path / "run", task=task(4)).records == whole.records


def test_tables_and_reports_show_the_loss_and_metrics_where_there_is_no_accuracy(tmp_path):
    metrics = {"mae": absolute}
    task = fedprior.own_task(
        seeded(lambda: nn.Linear(3, 1)), regression(), loss=nn.MSELoss(reduction="none"), metrics=metrics, **QUICK
    )
    result = fedprior.run(task, "fedavg", out=tmp_path / "run")
    assert "global_accuracy" not in json.loads((tmp_path / "run" / "summary.json").read_text())
    table = summary_table([result.summary])
    headers = [str(column.header) for column in table.columns]
    cells = {header: next(iter(column.cells)) for header, column in zip(headers, table.columns, strict=True)}
    assert cells["global acc."] == cells["local acc."] == "–"
    for name in ("loss", "mae"):
        for where in ("global", "local"):
            assert float(cells[f"{where} {name}"]) == pytest.approx(result.summary[f"{where}_{name}"], rel=1e-3)
    run = read_run(tmp_path / "run")
    assert "global mae" in table_of_runs([run]).markdown()
    assert "local loss" in table_of_runs([run]).latex()
    header, line = numbers_of_runs([run]).csv().splitlines()
    found = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(found["global_mae"]) == result.summary["global_mae"]
    assert found["global_accuracy"] == ""
    scores = fedprior.evaluate(result)
    assert scores["loss"] == pytest.approx(result.summary["global_loss"], rel=1e-12)
    assert scores["mae"] == pytest.approx(result.summary["global_mae"], rel=1e-12)
    assert "accuracy" not in scores


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([absolute], "functions by name"),
        ({"loss": absolute}, "not loss, accuracy or one that ends in _late, _worst or _spread"),
        ({"mae_worst": absolute}, "not loss, accuracy or one that ends in"),
        ({"a/b": absolute}, "letters and digits"),
        ({"mae": 3}, "not a function"),
        ({"mae": lambda o, y: 3.0}, "must return a tensor"),
        ({"mae": lambda o, y: torch.ones(7)}, "must return a tensor"),
        ({"mae": lambda o, y: o @ y @ o @ y}, "metric 'mae' cannot be computed"),
        ({"mae": lambda o, y: torch.tensor(float((o - y).mean()))}, "metric 'mae' cannot be computed with torch"),
    ],
)
def test_an_invalid_metric_is_refused_at_once(metrics, message):
    with pytest.raises((SettingError, ModelError), match=message) as caught:
        fedprior.own_task(nn.Linear(3, 1).double(), regression(), loss=nn.MSELoss(reduction="none"), metrics=metrics)
    assert "\n" not in str(caught.value)


def test_a_loss_that_broadcasts_across_examples_is_refused():
    x, y, *_ = regression()[0]
    with pytest.raises(ModelError, match="differ in shape"):
        fedprior.own_task(nn.Linear(3, 1).double(), [(x, y[:, 0])], loss=lambda o, y: (o - y) ** 2)
