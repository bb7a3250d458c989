"""Figures show the numbers of the records; that they are pleasant to look at, no test can say."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from fedprior.report import find_runs, group_runs
from fedprior.report.reading import Partition

pytest.importorskip("matplotlib", reason="the extra fedprior[report] is not installed")
from fedprior.report import figures

LEGEND = {"fedavg": "FedAvg", "feddrop": "FedDrop", "fedl1": "FedL1", "fedsparse-low": "FedSparse, low"}
NAMES = {label: figures.Name(text) for label, text in LEGEND.items()}


@pytest.fixture
def groups(paperlike):
    return group_runs(find_runs(paperlike).runs)


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_lines_are_means_over_seeds_and_bands_their_standard_errors(groups):
    figure = figures.accuracy_against_bytes(groups, NAMES)
    above, below = figure.axes
    for axes, field in ((above, "global_accuracy"), (below, "local_accuracy")):
        for group in groups:
            values = np.array([[r[field] for r in run.rounds if field in r] for run in group.runs])
            line = lines(axes)[LEGEND.get(group.label, group.label)]
            np.testing.assert_allclose(line.get_ydata(), 100 * values.mean(0))
            sent = np.mean([[run.series("gib")[r] for r in run.series(field)] for run in group.runs], 0)
            np.testing.assert_allclose(line.get_xdata(), sent)
    values = np.array([[r["global_accuracy"] for r in run.rounds if "sparsity" in r] for run in groups[0].runs])
    band = above.collections[0].get_paths()[0].vertices
    top = 100 * (values.mean(0) + values.std(0, ddof=1) / np.sqrt(3))
    assert band[:, 1].max() == pytest.approx(top.max())


def test_against_rounds_the_axis_is_rounds(groups):
    for figure in (figures.accuracy_against_rounds(groups), figures.sparsity_over_rounds(groups)):
        assert list(lines(figure.axes[0])["fedavg"].get_xdata()) == list(range(10, 201, 10))


def test_labels_without_gates_have_no_total_variation(groups):
    for axes in figures.total_variation(groups).axes:
        assert set(lines(axes)) == {"fedsparse-low", "fedsparse-mid", "fedsparse-high"}


def test_a_label_has_one_colour_in_all_figures(groups):
    names = {group.label: figures.Name(group.label) for group in groups}
    made = [
        figures.accuracy_against_bytes(groups, names),
        figures.accuracy_against_rounds(groups[::-1], names),
        figures.total_variation(groups[3:], names),
    ]
    colours = [{label: line.get_color() for label, line in lines(figure.axes[0]).items()} for figure in made]
    assert colours[0] == colours[1]
    assert colours[2].items() <= colours[0].items()
    assert len(set(colours[0].values())) == len(groups)


def test_a_variant_has_its_originals_colour_and_other_dashes(groups):
    first, *others = [group.label for group in groups]
    names = {label: figures.Name(label, "" if label == first else first) for label in (first, *others)}
    drawn = lines(figures.accuracy_against_bytes(groups, names).axes[0])
    assert len({line.get_color() for line in drawn.values()}) == 1
    looks = {(str(line._dash_pattern), line.get_marker()) for line in drawn.values()}
    assert len(looks) == len(groups), "curves of one colour differ"
    assert {len(line.get_markevery()) > 1 for line in list(drawn.values())[1:]} == {True}
    alone = lines(figures.accuracy_against_bytes(groups[1:], {label: names[label] for label in others}).axes[0])
    assert len({line.get_color() for line in alone.values()}) == len(others), "without it they are methods like others"


def test_the_legend_names_every_line_once_and_fits_the_figure(groups):
    figure = figures.accuracy_against_bytes(groups, NAMES)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(
        LEGEND.get(group.label, group.label) for group in groups
    )
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("length", [3, 14, 15, 17, 23, 30, 120])
def test_the_legend_fits_names_of_any_length(paperlike, length):
    groups = group_runs(find_runs(paperlike).runs)
    names = {group.label: figures.Name(f"{group.label[:3]} {'w ' * length}"[:length]) for group in groups}
    figure = figures.sparsity_over_rounds(groups, names)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    # And the panel is not squeezed by it.
    assert figure.axes[0].get_window_extent().height > 0.5 * figure.dpi


def test_the_partition_picture_has_the_shares_of_every_client():
    random = np.random.RandomState(0)
    counts = np.array([random.multinomial(50, random.dirichlet(np.full(5, 0.3))) for _ in range(30)])
    figure = figures.partition_picture(Partition("0", 5, counts, counts))
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown.shape == (5, 30)
    assert sorted(map(tuple, shown.T.round(6))) == sorted(map(tuple, (2.0 * counts).round(6)))
    assert (np.diff(shown.argmax(0)) >= 0).all(), "clients of a kind stand side by side"


def test_files_are_pictures_and_the_same_records_give_the_same_bytes(groups, tmp_path):
    for folder in ("one", "other"):
        paths = figures.save(figures.sparsity_over_rounds(groups), tmp_path / folder, "sparsity")
        assert [path.name for path in paths] == ["sparsity.png", "sparsity.svg", "sparsity.pdf"]
    for path in paths:
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()
    with Image.open(paths[0]) as image:
        assert image.width == pytest.approx(300 * figures.COLUMN, abs=1)
    assert paths[1].read_text().startswith("<?xml")
    assert paths[2].read_bytes().startswith(b"%PDF")


def test_no_records_give_an_empty_figure(tmp_path, write_run):
    write_run(tmp_path / "run", rounds=2, finished=False, every=100)
    (tmp_path / "run" / "rounds.jsonl").write_text("")
    groups = group_runs(find_runs(tmp_path).runs)
    for draw in (figures.accuracy_against_bytes, figures.sparsity_over_rounds, figures.total_variation):
        for given in (groups, []):
            figures.save(draw(given), tmp_path / "figures", "empty", ["png"])


def test_only_the_first_rounds_may_lie_below_the_axis(tmp_path, write_run):
    """An accuracy may fall while the model trains, as SCAFFOLD's local one does; that must be seen."""
    write_run(tmp_path / "rising", label="rising")
    falling = write_run(tmp_path / "falling", label="falling", finished=False)
    records = [json.loads(line) for line in (falling / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record |= {key: 1 - record["round"] / 400 for key in record if key.endswith("accuracy")}
    (falling / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for axes in figures.accuracy_against_rounds(group_runs(find_runs(tmp_path).runs)).axes:
        low, high = axes.get_ylim()
        for line in axes.get_lines():
            assert low < line.get_ydata()[2:].min()
            assert line.get_ydata().max() < high


def test_one_seed_has_a_line_without_a_band(paperlike, tmp_path):
    groups = group_runs(find_runs(paperlike / "fedavg" / "seed-0").runs)
    figure = figures.accuracy_against_bytes(groups)
    assert len(lines(figure.axes[0])["fedavg"].get_ydata()) == 20
    figures.save(figure, tmp_path, "one", ["png"])


def test_without_matplotlib_one_line_says_how_to_install_it(groups, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(figures.NoMatplotlibError, match=r"pip install 'fedprior\[report\]'"):
        figures.accuracy_against_bytes(groups)
