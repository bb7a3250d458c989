"""A budget of bytes: the run that was asked for stays within it, and would not with a larger network."""

import pytest

import fedprior
from fedprior.catalogue.algorithms import run_settings
from fedprior.core.errors import SettingError
from fedprior.runs.budget import read_bytes, run_bytes, sparsity_for


@pytest.mark.parametrize(
    ("text", "count"), [("5GiB", 5 * 2**30), ("800 MB", 800_000_000), ("0.5KiB", 512), ("12B", 12), (".5kB", 500)]
)
def test_byte_counts_are_parsed_with_their_unit(text, count):
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["5", "GiB", "-1MB", "1e9B", "5 gigabytes", ""])
def test_invalid_byte_counts_are_refused(text):
    with pytest.raises(SettingError, match="number of bytes"):
        read_bytes(text)


@pytest.mark.parametrize("precision", ["float32", "int8/int4"])
@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("fedsparse-sized", 0.0),
        ("fednarrow", 0.0),
        ("fednarrow", 0.5),
        ("fednarrow+scaffold", 0.3),
        ("fednarrow-unstructured", 0.0),
    ],
)
def test_a_run_sends_the_predicted_bytes_and_stays_within_its_budget(small_task, name, rate, precision):
    task = small_task()
    given = {"rounds": 30, "wire": precision, "entropy": precision == "float32"}  # which has no code to be without
    settings = run_settings({**task.defaults, **given}, task.data.clients)
    own = {"dense_rounds": 2, "shrink": 0.3} if name == "fednarrow-unstructured" else {"linear_rate": rate}
    build = lambda sparsity: fedprior.algorithm(name, task.network, sparsity=sparsity, **own)  # noqa: E731
    budget = int(0.7 * run_bytes(build(0.0), task.network, settings, task.data.clients))
    sparsity = sparsity_for(budget, build, task.network, settings, task.data.clients)
    assert 0 < sparsity < 1
    assert run_bytes(build(sparsity - 0.05), task.network, settings, task.data.clients) > budget
    result = fedprior.run(task, build(sparsity), **given)
    sent = result.summary["bytes_up"] + result.summary["bytes_down"]
    assert sent <= budget
    # Of many sub-networks the mean is foreseen; what is assigned by votes, or to single weights, depends on training.
    room = 0.2 if rate else 0.02 if name in ("fednarrow-unstructured", "fedsparse-sized") else 0
    assert sent == pytest.approx(run_bytes(build(sparsity), task.network, settings, task.data.clients), rel=room)


def test_few_sub_networks_are_counted_one_by_one(small_task):
    task = small_task()
    settings = run_settings({**task.defaults, "rounds": 5}, task.data.clients)
    drawn = fedprior.algorithm("fednarrow", task.network, sparsity=0.2, linear_rate=0.5)
    sent = fedprior.run(task, drawn, rounds=5).summary
    foreseen = run_bytes(drawn, task.network, settings, task.data.clients)
    assert foreseen == sent["bytes_up"] + sent["bytes_down"]


def test_budgets_that_are_too_small_or_need_no_pruning(small_task):
    task = small_task()
    settings = run_settings({**task.defaults, "rounds": 5}, task.data.clients)
    build = lambda sparsity: fedprior.algorithm("fednarrow", task.network, sparsity=sparsity)  # noqa: E731
    assert sparsity_for(10**9, build, task.network, settings, task.data.clients) == 0
    with pytest.raises(SettingError, match="too small"):
        sparsity_for(10, build, task.network, settings, task.data.clients)
    with pytest.raises(SettingError, match="only fednarrow"):
        run_bytes(fedprior.algorithm("fedavg", task.network), task.network, settings, task.data.clients)
