"""Scores of probabilities against naive formulas in NumPy, and the same in every engine."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap

import fedprior
from fedprior.core.errors import SettingError
from fedprior.core.network import IGNORED, Network, Whole
from fedprior.core.probabilities import METRICS, binned, brier, calibration_error, confidences, reliability
from fedprior.runs.early import best
from fedprior.trained.export import evaluate


def ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


def naive_ece(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """As textbooks have it: sort, cut into equally many, compare the means."""
    order = np.argsort(confidence, kind="stable")
    total = 0.0
    for b in range(bins):
        own = [order[i] for i in range(len(order)) if bins * i // len(order) == b]
        if own:
            total += len(own) / len(order) * abs(confidence[own].mean() - right[own].mean())
    return total


def test_scores_of_a_case_by_hand():
    """Probabilities 3/4 and 1/4, right; 2/3 and 1/3, wrong."""
    outputs = torch.tensor([[3.0, 1.0], [2.0, 1.0]]).log()
    y = torch.tensor([0, 1])
    assert brier(outputs, y).tolist() == pytest.approx([2 / 16, 8 / 9])
    parts = confidences(outputs, y)
    assert parts.tolist() == [[pytest.approx(3 / 4), 1, 1], [pytest.approx(2 / 3), 0, 1]]
    # Each is alone in its bin: |3/4 − 1| and |2/3 − 0|, half the examples each.
    assert float(calibration_error(parts, ones(2))) == pytest.approx((1 / 4 + 2 / 3) / 2)
    assert reliability(parts, ones(2)) == {
        **{"confidence/1": 0.6667, "accuracy/1": 0.0},
        **{"confidence/8": 0.75, "accuracy/8": 1.0},
    }


def test_a_calibrated_network_has_no_error_and_a_boastful_one_the_whole():
    confidence = torch.full((300,), 0.8)
    right = torch.arange(300) % 5 > 0
    parts = torch.stack([confidence, right, torch.ones(300)], -1).double()
    assert float(calibration_error(parts, ones(300))) == pytest.approx(0, abs=1e-7)
    parts[:, 0] = 1.0
    assert float(calibration_error(parts, ones(300))) == pytest.approx(0.2)


@given(st.integers(0, 80), st.integers(2, 6), st.integers(0, 2**31))
def test_the_calibration_error_is_the_naive_one_whatever_the_padding(count, classes, seed):
    draw = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(count, classes, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (count,), generator=draw)
    p = outputs.softmax(1).numpy()
    truth = naive_ece(p.max(1), p.argmax(1) == y.numpy()) if count else 0.0
    parts = confidences(outputs, y)
    assert float(calibration_error(parts, ones(count))) == pytest.approx(truth, abs=1e-12)
    more = torch.cat([parts, torch.rand(7, 3, generator=draw).double()])
    weight = torch.cat([ones(count), torch.zeros(7)])
    turned = torch.randperm(count + 7, generator=draw)
    assert float(calibration_error(more[turned], weight[turned])) == pytest.approx(truth, abs=1e-12)
    assert binned(parts, ones(count))[:, 2].sum() == count
    assert np.ptp(binned(parts, ones(count))[:, 2].numpy()) <= 1
    one_hot = np.eye(classes)[y.numpy()]
    assert brier(outputs, y).numpy() == pytest.approx(((p - one_hot) ** 2).sum(1), abs=1e-12)


def test_positions_of_a_sequence_that_do_not_count_are_left_out():
    """Classes after the batch, as torch has them: [examples, classes, positions]."""
    outputs = torch.randn(3, 4, 5, dtype=torch.float64)
    y = torch.randint(4, (3, 5))
    y[0, 2:] = IGNORED
    p, kept = outputs.movedim(1, -1).softmax(-1).numpy(), (y != IGNORED).numpy()
    right = p.argmax(-1) == y.numpy()
    parts = confidences(outputs, y)
    truth = naive_ece(p.max(-1)[kept], right[kept])
    assert float(calibration_error(parts, ones(3))) == pytest.approx(truth)
    one_hot = np.eye(4)[y.clamp(min=0).numpy()]
    each = ((p - one_hot) ** 2).sum(-1)
    assert brier(outputs, y).numpy() == pytest.approx([each[i][kept[i]].mean() for i in range(3)])
    assert vmap(calibration_error)(parts[None], ones(3)[None]).shape == (1,)


@pytest.mark.parametrize("name", ["fedavg", "fedmix", "fedsparse"])
def test_both_engines_report_what_numpy_does(small_task, name):
    """Global: of the server's model on everyone's examples. Local: the mean over clients of each one's own."""
    mode = {"in-turn": {"workers": 1}, "vectorised": {}}
    dtype = torch.float64
    found = {}
    for how, more in mode.items():
        task = small_task((5, 11, 2, 8), test_sizes=(20, 3, 0, 7), dtype=dtype, clients_per_round=4, rounds=1)
        found[how] = fedprior.run(task, fedprior.algorithm(name, task.network), mode=how, **more)
    one, other = (result.records[-1] for result in found.values())
    for field in (f"{where}_{score}" for where in ("global", "local") for score in METRICS):
        assert one[field] == pytest.approx(other[field], abs=1e-9), field
    data, model = task.data, found["in-turn"].model
    p = model(data.test_x).softmax(1).detach().numpy()
    y = data.test_y.numpy()
    assert one["global_nll"] == pytest.approx(-np.log(p[range(30), y]).mean()) == one["global_loss"]
    assert one["global_brier"] == pytest.approx(((p - np.eye(4)[y]) ** 2).sum(1).mean())
    assert one["global_ece"] == pytest.approx(naive_ece(p.max(1), p.argmax(1) == y))
    assert sum(one[f"accuracy/{number}"] for number in range(1, 16)) / 15 == pytest.approx(
        (p.argmax(1) == y).mean(), abs=1e-4
    )


def test_a_clients_own_scores_are_of_its_own_model(small_task):
    """FedAvg's only client is the server."""
    task = small_task((9,), test_sizes=(31,), clients_per_round=1, rounds=1)
    last = fedprior.run(task, "fedavg").records[-1]
    for score in METRICS:
        assert last[f"local_{score}"] == pytest.approx(last[f"global_{score}"], rel=1e-5)


# ---------------------------------------------------------------------- by name, from Python
def test_a_metric_is_added_by_name(small_task, monkeypatch):
    def top2(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.topk(2, 1).indices == targets[:, None]).any(1)

    monkeypatch.setitem(METRICS, "top2", top2)
    result = fedprior.run(small_task(), "fedavg", rounds=2, metrics="top2,nll")
    data = result.simulation.data
    truth = top2(result.model(data.test_x), data.test_y).double().mean()
    assert result.summary["global_top2"] == pytest.approx(float(truth))
    assert "global_nll" in result.summary
    assert "global_ece" not in result.summary


def test_a_metric_of_a_whole_set_is_no_mean_over_examples(small_task):
    """The largest confidence, of everyone's examples and of each client's own, in both engines."""
    largest = Whole(lambda o, y: o.softmax(1).max(1).values, lambda parts, weight: (parts * weight).max())
    for how in ("in-turn", "vectorised"):
        task = small_task(dtype=torch.float64)
        network = Network(task.network.module, task.network.example, metrics={"largest": largest})
        task = fedprior.Task("own", network, task.data, task.defaults)
        result = fedprior.run(task, "fedavg", rounds=1, mode=how)
        truth = float(result.model(task.data.test_x).softmax(1).max().detach())
        assert result.summary["global_largest"] == pytest.approx(truth)
        assert 0.25 < result.summary["local_largest"] < 1
        assert evaluate(result)["largest"] == pytest.approx(truth)


LOSSES = {"global_loss", "global_loss_worst", "global_loss_spread"}


def test_what_has_no_probabilities_has_no_scores_of_them():
    x = torch.randn(6, 2)
    task = fedprior.own_task(nn.Linear(2, 2), [(x, x, x, x)], loss=nn.MSELoss(reduction="none"), device="cpu")
    result = fedprior.run(task, "fedavg", rounds=1, clients_per_round=1)
    assert {key for key in result.summary if key.startswith("global")} == LOSSES


def test_an_unknown_metric_is_named(small_task):
    with pytest.raises(SettingError, match="unknown metric 'birer'; did you mean 'brier'"):
        fedprior.run(small_task(), "fedavg", metrics="nll,birer")
    wrong, clients = Whole(lambda o, y: o, lambda parts, weight: parts), [(torch.randn(2, 2), torch.tensor([0, 1]))]
    with pytest.raises(fedprior.ModelError, match="join its parts to one number"):
        fedprior.own_task(nn.Linear(2, 2), clients, metrics={"w": wrong})


def test_less_is_better_for_scores_of_probabilities():
    records = [{"round": i, "sparsity": 0.0, "global_ece": value} for i, value in enumerate([0.2, 0.1, 0.3], 1)]
    assert best(records, "global_ece") == ("global_ece", 2, 0.1, 1)
    assert math.isclose(best(records, "global_ece").value, 0.1)
