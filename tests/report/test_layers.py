"""Where the parameters went: the table and the figure say what the records do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedprior.report.layers import layers_of, table_of_layers, units_over_rounds, with_layers
from fedprior.report.records import find_runs, group_runs
from fedprior.report.write import write_report


def counted(write_run: Callable[..., Path], folder: Path, label: str, seed: int, kept: list[tuple[int, int]]) -> None:
    """A run of three rounds that keeps so many units of two layers."""
    write_run(folder, label=label, seed=seed, rounds=len(kept), every=1)
    path = folder / "rounds.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record, (first, second) in zip(records, kept, strict=True):
        record |= {"units/conv1": first, "units/fc1": second}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def runs(tmp_path: Path, write_run: Callable[..., Path]) -> Path:
    counted(write_run, tmp_path / "a0", "learned", 0, [(32, 512), (30, 200), (28, 100)])
    counted(write_run, tmp_path / "a1", "learned", 1, [(32, 512), (31, 210), (29, 101)])
    counted(write_run, tmp_path / "b", "narrow", 0, [(16, 128)] * 3)
    write_run(tmp_path / "c", label="fedavg", rounds=3, every=1)
    return tmp_path


def test_the_table_has_the_units_at_the_end(runs: Path) -> None:
    groups = group_runs(find_runs(runs).runs)
    assert layers_of(groups) == ["conv1", "fc1"]
    table = table_of_layers(groups)
    assert list(table.header) == ["layer", "most", "learned", "narrow"]
    assert [list(row) for row in table.rows] == [["conv1", "32", "28.5", "16"], ["fc1", "512", "100.5", "128"]]


def test_the_figure_has_a_panel_a_label_and_a_line_a_layer(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = units_over_rounds(with_layers(group_runs(find_runs(runs).runs)))
    learned, narrow = figure.axes
    assert [line.get_ydata().tolist() for line in learned.lines] == [
        pytest.approx([100, 100 * 30.5 / 32, 100 * 28.5 / 32]),
        pytest.approx([100, 100 * 205 / 512, 100 * 100.5 / 512]),
    ]
    assert [line.get_ydata().tolist() for line in narrow.lines] == [[50] * 3, [25] * 3]
    assert [axes.get_title("left") for axes in figure.axes] == ["learned", "narrow"]


def test_a_report_has_both_only_where_units_are_counted(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    write_report([runs], out / "all.html", figures_to=out / "all", tables_to=out / "all")
    assert (out / "all" / "units.svg").exists()
    assert "| fc1 | 512 | 100.5 | 128 |" in (out / "all" / "layers.md").read_text()
    write_report([runs / "c"], out / "one.html", figures_to=out / "one", tables_to=out / "one")
    assert not (out / "one" / "units.svg").exists()
    assert not (out / "one" / "layers.md").exists()
