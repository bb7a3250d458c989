"""Figures of the paper from records: one line per label, the mean over seeds, with a band of one standard error.

Figures fit the width of a paper's column. They are drawn without pyplot, and so without a display or any global state.
matplotlib comes with the extra `fedprior[report]`.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedprior.core.errors import FedpriorError
from fedprior.core.files import write_atomically, writing
from fedprior.report.legend import draw_legend, legend_height
from fedprior.report.reading import Partition
from fedprior.report.records import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = 3.35
"""The width in inches of one column of a two-column paper."""
FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's colours, distinct for every kind of colour vision; dashes tell lines apart in grey.
COLOURS = ("#000000", "#E69F00", "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#999999")
DASHES = ("-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), "-", (0, (6, 1)), "-", (0, (2, 1)), (0, (1, 1)))
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.1,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # searchable text, not outlines
    "svg.hashsalt": "fedprior",  # the same records give the same file
}

VARIANTS = (((0, (1, 1)), "o"), ((0, (3, 1, 1, 1)), "s"), ((0, (2, 2)), "^"), ((0, (5, 1)), "D"), ((0, (1, 3)), "v"))
"""Dashes and marks of variants: they share the colour of what they vary, and have hollow marks all along."""
ALONG = 8
"""About how many marks a variant's line has."""


class Name(NamedTuple):
    """What a legend calls a label."""

    text: str
    variant_of: str = ""
    """The label whose colour it shares."""


Names = Mapping[str, Name]
"""The names in the legend's order. Colours follow this order, so that they agree in all figures."""
Draw = Callable[[Sequence[Group], Names | None], "Figure"]
Asked = Mapping[str, tuple[Draw, Sequence[Group]]]
"""Which figure to draw of which groups, by file name."""


class NoMatplotlibError(FedpriorError):
    """matplotlib is not installed."""


def accuracy_against_bytes(groups: Sequence[Group], names: Names | None = None) -> "Figure":
    """Global and local accuracy against the GiB communicated: the paper's main figure, and its SCAFFOLD figure."""
    return _panels(groups, names, ACCURACIES, "gib", "GiB communicated")


def accuracy_against_rounds(groups: Sequence[Group], names: Names | None = None) -> "Figure":
    """Global and local accuracy against communication rounds; with two labels, with and without server pruning."""
    return _panels(groups, names, ACCURACIES, "round", "round")


def sparsity_over_rounds(groups: Sequence[Group], names: Names | None = None) -> "Figure":
    """The share of the network that is gone, over rounds."""
    return _panels(groups, names, (("sparsity", "sparsity (%)", 100.0),), "round", "round")


def total_variation(groups: Sequence[Group], names: Names | None = None) -> "Figure":
    """Mean and maximum total variation between the gates of clients and server, for the labels that have gates."""
    return _panels(groups, names, TOTAL_VARIATIONS, "round", "round")


def partition_picture(partition: Partition) -> "Figure":
    """Class against client: the share of each client's training examples that belongs to each class."""
    with figure_style():
        from matplotlib.figure import Figure

        shares = partition.train / np.maximum(partition.train.sum(1, keepdims=True), 1)
        # Similar clients stand side by side: sorted by their most frequent class, and by how frequent it is.
        top = shares.argmax(1)
        order = np.lexsort((-shares[np.arange(len(shares)), top], top))
        figure = Figure((COLUMN, 2.1 if partition.classes <= 40 else 2.8), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(
            100 * shares[order].T, aspect="auto", origin="lower", cmap="Blues", vmin=0, interpolation="nearest"
        )
        axes.grid(False)
        axes.set(xlabel=f"{len(shares):,} clients, by their most frequent class", ylabel="class", xticks=[])
        if partition.classes <= 12:
            axes.set_yticks(range(partition.classes))
        bar = figure.colorbar(image, pad=0.02)
        bar.set_label("% of the client's examples")
        bar.outline.set_linewidth(0.6)
    return figure


def write_figures(
    folder: Path, asked: Asked, names: Names | None = None, partitions: Sequence[Partition] = ()
) -> list[Path]:
    """Write every figure that there are groups for, and the partitions, in every format."""
    drawn = {name: draw(groups, names) for name, (draw, groups) in asked.items() if groups}
    for number, partition in enumerate(partitions):
        drawn[f"partition-{number}" if number else "partition"] = partition_picture(partition)
    return [path for name, figure in drawn.items() for path in save(figure, folder, name)]


def save(figure: "Figure", folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure in every format; the same records give the same bytes."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    paths = [folder / f"{name}.{kind}" for kind in formats]
    with figure_style():
        for path, kind in zip(paths, formats, strict=True):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, metadata=undated.get(kind))
            write_atomically(path, drawn.getvalue())
    return paths


TOTAL_VARIATIONS = (("tv_mean", "mean total variation", 1.0), ("tv_max", "maximum total variation", 1.0))
ACCURACIES = (("global_accuracy", "global accuracy (%)", 100.0), ("local_accuracy", "local accuracy (%)", 100.0))


def _panels(
    groups: Sequence[Group],
    names: Names | None,
    rows: Sequence[tuple[str, str, float]],
    against: str,
    xlabel: str,
) -> "Figure":
    """One panel per field, stacked on a shared axis, with one legend above them."""
    with figure_style():
        from matplotlib.figure import Figure

        looks = _looks(groups, names)
        shown = [looks[group.label]["label"] for group in groups]
        figure = Figure((COLUMN, 0.5 + 1.7 * len(rows) + legend_height(shown, COLUMN)), layout="constrained")
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (field, ylabel, scale) in zip(panels, rows, strict=True):
            for group in groups:
                _line(axes, group, field, against, scale, looks[group.label])
            axes.set_ylabel(ylabel)
            axes.margins(x=0.02)
            if field.endswith("accuracy"):
                _skip_the_start(axes)
            else:
                axes.set_ylim(0, 1.05 * axes.dataLim.y1 if axes.get_lines() and axes.dataLim.y1 > 0 else 1)
        panels[-1].set_xlabel(xlabel)
        panels[-1].set_xlim(left=0)
        panels[-1].locator_params(axis="x", integer=against == "round")
        figure.align_ylabels(panels)
        draw_legend(figure, panels[0])
    return figure


def _line(axes: "Axes", group: Group, field: str, against: str, scale: float, look: Mapping[str, Any]) -> None:
    curve = group.curve(field, against)
    if not len(curve.x):
        return
    mean, error = scale * curve.mean, scale * np.nan_to_num(curve.error)
    axes.fill_between(curve.x, mean - error, mean + error, color=look["color"], alpha=0.22, linewidth=0)
    # The last mark is where training ended, which differs from line to line where the axis is bytes.
    last = len(curve.x) - 1
    marks = range(last, -1, -max(1, len(curve.x) // ALONG)) if "markerfacecolor" in look else [last]
    axes.plot(curve.x, mean, markevery=sorted(marks), markersize=2.6, markeredgewidth=0.7, clip_on=True, **look)


def _skip_the_start(axes: "Axes") -> None:
    """Begin an accuracy's axis above the steep first rounds, where all lines overlap; show all the rest."""
    later = [np.asarray(line.get_ydata(), float)[len(line.get_xdata()) // 12 :] for line in axes.get_lines()]  # type: ignore[arg-type]
    if later:
        low, high = float(min(values.min() for values in later)), float(axes.dataLim.y1)  # leave room for the bands
        room = 0.05 * max(high - low, 1)
        axes.set_ylim(max(low - room, 0), high + room)


def _looks(groups: Sequence[Group], names: Names | None) -> dict[str, dict[str, Any]]:
    """Colour, dashes, mark and name of every label."""
    known = dict(names or {})
    for group in groups:
        known.setdefault(group.label, Name(group.label))
    own = [label for label, name in known.items() if name.variant_of not in known]
    looks: dict[str, dict[str, Any]] = {}
    varied: dict[str, int] = {}
    for label, name in known.items():
        base = label
        while base not in own:
            base = known[base].variant_of
        i = own.index(base)
        looks[label] = {"color": COLOURS[i % 8], "label": name.text}
        if label in own:
            # After the last colour they start again, with other dashes.
            looks[label] |= {"linestyle": DASHES[(i + 6 * (i // 8)) % 8], "marker": "o"}
        else:
            dashes, mark = VARIANTS[varied.get(base, 0) % len(VARIANTS)]
            varied[base] = varied.get(base, 0) + 1
            looks[label] |= {"linestyle": dashes, "marker": mark, "markerfacecolor": "white"}
    return looks


def figure_style() -> Any:
    """The style as a context. Without matplotlib, the error says in one line how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlibError("figures need matplotlib: pip install 'fedprior[report]'") from error
    return matplotlib.rc_context(STYLE)
