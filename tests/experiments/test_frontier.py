"""The frontier: which runs it has, which points are on the front, and that it can be continued."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprior.core.errors import SettingError
from fedprior.report import pareto
from fedprior.report.pareto import Point, Reference, points_of
from fedprior.report.records import Estimate, find_runs
from fedprior.runs import sweeps
from fedprior_experiments import frontier

RESULTS = Path(__file__).parents[2] / "results"


class OneGroup:
    """Stands for a group of runs."""

    def __init__(self, label: str, gib: float, accuracy: float) -> None:
        self.label, self.values = label, {"gib": gib, "global_accuracy": accuracy}
        self.runs = [self]
        self.config = {"run": {"wire": "int4", "algorithm": "own"}, "algorithm": {"sparsity": 0.5}}

    def final(self, name: str) -> Estimate:
        return Estimate(self.values.get(name, 0.5), 0.01, 3)

    late = final


pairs = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=12)


@given(pairs)
def test_no_point_dominates_one_on_the_front(given_pairs):
    points = points_of([OneGroup(str(i), x, y) for i, (x, y) in enumerate(given_pairs)])  # type: ignore[misc]
    front = [(p.gib.mean, p.global_accuracy.mean) for p in points if p.best]
    assert front
    for x, y in given_pairs:  # everything is on the front, or something on the front is at least as good
        assert any(gib <= x and accuracy >= y for gib, accuracy in front)
    for (a, b), (c, d) in itertools.pairwise(sorted(set(front))):  # along the front, more bytes buy more accuracy
        assert a < c
        assert b < d


def test_every_combination_is_a_run_and_settings_reach_those_that_know_them(tmp_path: Path):
    specs = frontier.plan(
        "mnist-mini",
        [0.0, 0.8],
        ["float32", "int8/int4"],
        ["fedavg", "feddrop"],
        [3, 4],
        {"conv_rate": "0.2", "alpha": "1"},
        tmp_path,
        {"rounds": 2},
    )
    assert len(specs) == 2 * (2 + 2 * 2)
    assert len({spec.out for spec in specs}) == len(specs)
    assert {spec.algorithm_settings.get("conv_rate") for spec in specs if spec.algorithm == "feddrop"} == {"0.2"}
    assert {(s.run["wire"], s.algorithm_settings["sparsity"]) for s in specs if s.algorithm == "fednarrow"} == {
        (wire, sparsity) for wire in ("float32", "int8/int4") for sparsity in (0.0, 0.8)
    }
    assert all(spec.task_options == {"alpha": "1"} and spec.run["rounds"] == 2 for spec in specs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparsities": [1.0]}, "at least 0 and below 1"),
        ({"wires": ["int3"]}, "wire must be"),
        ({"baselines": ["fedag"]}, "unknown algorithm"),
        ({"settings": {"wire": "int4"}}, "not with --set"),
        ({"sparsities": [0.5, 0.5]}, "twice"),
    ],
)
def test_options_that_make_no_frontier_are_refused(changes, words, tmp_path):
    asked = {"sparsities": [0.5], "wires": ["int4"], "baselines": [], "seeds": [0], "settings": {}}
    with pytest.raises(SettingError, match=words):
        frontier.plan("mnist-mini", out=tmp_path, options={}, **{**asked, **changes})


def test_table_and_figure_show_every_point():
    pytest.importorskip("matplotlib")
    points = [
        Point(
            f"p{i}",
            f"family {i % 3}",
            Estimate(g, 0.1, 3),
            Estimate(a, 0.01, 3),
            Estimate(0.9, 0, 3),
            Estimate(0, 0, 3),
        )
        for i, (g, a) in enumerate([(1, 0.5), (2, 0.6), (0.5, 0.55), (4, 0.4)])
    ]
    text = pareto.table_of_points("title", points).markdown()
    assert [line.split("|")[1].strip() for line in text.splitlines() if "| p" in line] == ["p2", "p0", "p1", "p3"]
    published = [Reference("FedAvg", 3.0, 50.0, None), Reference("FedDrop", 2.0, 51.0, 60.0)]
    figure = pareto.draw(points, published)
    marks = [(str(line.get_label()), list(line.get_xdata())) for line in figure.axes[0].lines]
    crosses = next(xs for label, xs in marks if "the paper's" in label)
    assert crosses == [3.0, 2.0]
    assert sum(len(xs) for _, xs in marks) == len(points) + len(published) + sum(p.best for p in points)
    assert [text.get_text() for text in figure.axes[1].texts] == ["FedDrop"]  # the other has no local accuracy


def test_runs_of_another_folder_are_shown_beside_and_never_twice(tmp_path: Path):
    """Those of the task, under labels that the frontier does not have itself."""
    options = {"rounds": 1, "clients_per_round": 2, "mode": "vectorised"}
    mine = frontier.plan("mnist-mini", [], [], ["fedavg"], [0], {}, tmp_path / "mine", options)
    others = frontier.plan("mnist-mini", [0.9], ["int4"], ["fedavg"], [0], {}, tmp_path / "others", options)
    sweeps.train_missing([*mine, *others])
    found = frontier.read(mine, frontier.beside(tmp_path / "others", "mnist-mini"))
    assert [run.label for run in found] == ["fedavg", "90% sparse, int4"]
    assert found[0].path == mine[0].out
    assert frontier.comparable(found) == (found, [])
    short = replace(found[1], rounds=())
    alike, notes = frontier.comparable([found[0], short])
    assert alike == [found[0]]
    assert "rounds = 0, not 1; left out" in notes[0]
    with pytest.raises(SettingError, match="holds no run of mnist-mini"):
        frontier.beside(tmp_path / "nowhere", "mnist-mini")


def test_the_papers_points_match_its_table():
    run = next(run for run in find_runs(RESULTS / "cifar10").runs if run.label == "fedavg")
    points = {point.label: point for point in frontier.published(run)}
    assert list(points) == ["FedAvg", "FedDrop", "FedL1", "low", "mid", "high"]
    assert (points["high"].gib, points["high"].global_accuracy) == (23, 68.4)
    assert frontier.published(replace(run, rounds=run.rounds[:10])) == []
    tuned = {**run.config, "task": {**run.config["task"], "validation": True}}
    assert frontier.published(replace(run, config=tuned)) == []
