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
        self.runs, self.rounds = [self], [{"bytes_up": 3 * 2**29, "bytes_down": 2**28}]
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


def grid(**changes) -> frontier.Grid:
    usual = {"methods": ["fedavg"], "sparsities": [0.5], "shares": [0.1], "wires": ["int4"]}
    return frontier.Grid(**{**usual, **changes})


def test_every_method_has_every_wire_and_settings_reach_those_that_know_them(tmp_path: Path):
    chosen = grid(
        methods=list(frontier.METHODS),
        sparsities=[0.5, 0.8],
        shares=[0.01],
        wires=["float32", "int8/int4"],
        seeds=[3, 4],
        dropout={"linear_rate": "0.4"},
    )
    specs = frontier.plan("mnist-mini", chosen, {"closing": "0.2", "alpha": "1"}, tmp_path, {"rounds": 2})
    assert len(specs) == 2 * 2 * (5 + 4 * 2)
    assert len({spec.out for spec in specs}) == len(specs)
    assert len({spec.label for spec in specs}) == len(specs) / 2
    wires = {name: {s.run["wire"] for s in specs if s.algorithm == name} for name in {s.algorithm for s in specs}}
    assert all(found == {"float32", "int8/int4"} for found in wires.values())
    learned = [s.algorithm_settings for s in specs if s.algorithm == "fedsparse-sized"]
    assert {s["closing"] for s in learned} == {"0.2"}
    assert {(s["sparsity"], s["linear_rate"]) for s in learned} == {(a, b) for a in (0.5, 0.8) for b in (0.0, "0.4")}
    assert {s.algorithm_settings.get("top_k") for s in specs} == {None, 0.01}
    assert all(spec.task_options == {"alpha": "1"} and spec.run["rounds"] == 2 for spec in specs)


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"methods": ["narrow"], "sparsities": [1.0]}, {}, "at least 0 and below 1"),
        ({"wires": ["int3"]}, {}, "wire must be"),
        ({"methods": ["fedag"]}, {}, "unknown method"),
        ({}, {"wire": "int4"}, "not with --set"),
        ({}, {"linear_rate": "0.5"}, "not with --set"),
        ({"sparsities": [0.5, 0.5]}, {}, "twice"),
        ({"seeds": [3, 3]}, {}, "3, 3 names something twice"),
        ({"wires": ["int4", "int4/int4"]}, {}, "int4, int4/int4 names something twice"),
        ({"methods": ["narrow"], "sparsities": []}, {}, "nothing to draw"),
        ({"dropout": {"input_rate": "0.1"}}, {}, "conv_rate and linear_rate, got input_rate"),
    ],
)
def test_what_makes_no_frontier_is_refused(changes, settings, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        frontier.plan("mnist-mini", grid(**changes), settings, tmp_path, {})


def test_table_and_figure_show_every_point():
    pytest.importorskip("matplotlib")
    points = [
        Point(
            f"p{i}",
            f"family {i % 3}",
            "int4" if i % 2 else "float32",
            Estimate(g, 0.1, 3),
            Estimate(g / 2, 0.1, 3),
            Estimate(g / 2, 0.1, 3),
            Estimate(a, 0.01, 3),
            Estimate(0.9, 0, 3),
            Estimate(0, 0, 3),
            best=g in (0.5, 2),
        )
        for i, (g, a) in enumerate([(1, 0.5), (2, 0.6), (0.5, 0.55), (4, 0.4)])
    ]
    text = pareto.table_of_points("title", points).markdown()
    assert [line.split("|")[1].strip() for line in text.splitlines() if "| p" in line] == ["p2", "p0", "p1", "p3"]
    published = [Reference("FedAvg", 3.0, 50.0, None), Reference("FedDrop", 2.0, 51.0, 60.0)]
    figure = pareto.draw(points, published)
    lines = figure.axes[0].lines
    crosses = {line.get_label(): (line.get_marker(), *line.get_xdata()) for line in lines if line.get_marker() in "x+"}
    assert crosses == {"paper: FedAvg": ("x", 3.0), "paper: FedDrop": ("+", 2.0)}
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"family 0", "float32 messages", "int4 messages", "beaten in both", "front", *crosses} <= set(said)
    drawn = {
        float(line.get_xdata()[0]): line for line in lines if len(line.get_xdata()) == 1 and line.get_marker() in "os"
    }
    assert sorted(drawn) == [0.5, 1.0, 2.0, 4.0]
    assert {x: line.get_color() == pareto.GREY for x, line in drawn.items()} == {
        0.5: False,
        1.0: True,
        2.0: False,
        4.0: True,
    }
    assert {x: line.get_marker() for x, line in drawn.items()} == {1.0: "o", 2.0: "s", 0.5: "o", 4.0: "s"}
    assert not figure.axes[0].texts  # no label on a mark
    assert not figure.axes[1].texts


def test_runs_of_another_folder_are_shown_beside_and_never_twice(tmp_path: Path):
    """Those of the task, under labels that the frontier does not have itself."""
    options = {"rounds": 1, "clients_per_round": 2, "mode": "vectorised"}
    mine = frontier.plan("mnist-mini", grid(), {}, tmp_path / "mine", options)
    both = grid(methods=["fedavg", "narrow"], sparsities=[0.9])
    others = frontier.plan("mnist-mini", both, {}, tmp_path / "others", options)
    sweeps.train_missing([*mine, *others])
    found = frontier.read(mine, frontier.beside(tmp_path / "others", "mnist-mini"))
    assert [run.label for run in found] == ["fedavg, int4", "narrow 90%, int4"]
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
    assert list(points) == ["FedAvg", "FedDrop", "FedL1", *(f"FedSparse, {level}" for level in ("low", "mid", "high"))]
    assert (points["FedSparse, high"].gib, points["FedSparse, high"].global_accuracy) == (23, 68.4)
    assert frontier.published(replace(run, rounds=run.rounds[:10])) == []
    tuned = {**run.config, "task": {**run.config["task"], "validation": True}}
    assert frontier.published(replace(run, config=tuned)) == []
