"""Accuracy against bytes, one point per label: which points are on the front, as a table and as a figure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedprior.core.late import MEANS
from fedprior.report.figures import COLOURS, COLUMN, figure_style
from fedprior.report.legend import draw_legend, legend_height
from fedprior.report.records import Estimate, Group, estimate
from fedprior.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADER = ("run", "global %", "local %", "GiB", "down", "up", "sparsity %", "seeds", "front")
MARKERS = "os^vDP"
PUBLISHED = "x+1234|_"
"""Marks of published points, which are only strokes."""
PALETTE = (*COLOURS[:7], "#7A3E9D", "#8B5A2B", "#2F4B26")
"""Without the grey, which says that a point is beaten."""
GREY = "#C4C4C4"
"""The colour of a point that another beats in both."""


@dataclass(frozen=True)
class Point:
    """The runs of one label over their seeds."""

    label: str
    family: str
    """What shares one colour in a figure: an algorithm, with dropout or without."""
    wire: str
    """What shares one mark: the precision of its messages."""
    gib: Estimate
    down: Estimate
    up: Estimate
    global_accuracy: Estimate
    local_accuracy: Estimate
    sparsity: Estimate
    best: bool = False
    """On the Pareto front: no other point has fewer bytes and a higher global accuracy."""


@dataclass(frozen=True)
class Reference:
    """A published point, drawn beside the others and not compared with them; accuracies in percent."""

    label: str
    gib: float
    global_accuracy: float | None
    local_accuracy: float | None


def points_of(groups: Sequence[Group]) -> list[Point]:
    """One point per group, with the front marked."""
    points = [
        Point(
            group.label,
            _family(group),
            str(group.runs[0].config["run"].get("wire", "float32")),
            group.final("gib"),
            _sent(group, "down"),
            _sent(group, "up"),
            group.late("global_accuracy"),
            group.late("local_accuracy"),
            group.final("sparsity"),
        )
        for group in groups
    ]
    return [replace(point, best=not any(_beats(other, point) for other in points)) for point in points]


def _family(group: Group) -> str:
    """An algorithm and, if it draws a part of what it keeps, dropout."""
    settings, name = group.runs[0].config["algorithm"], str(group.runs[0].config["run"]["algorithm"])
    sized = any(settings.get(size, "none") != "none" for size in ("sparsity", "max_parameters"))
    drawn = any(float(settings.get(rate, 0)) > 0 for rate in ("conv_rate", "linear_rate"))
    return f"{name} with dropout" if sized and drawn else name


def _sent(group: Group, way: str) -> Estimate:
    """The GiB that a run sent one way."""
    return estimate([sum(record[f"bytes_{way}"] for record in run.rounds) / 2**30 for run in group.runs])


def _beats(one: Point, other: Point) -> bool:
    """Whether one point is at least as good in both, and better in one."""
    fewer, more = one.gib.mean <= other.gib.mean, one.global_accuracy.mean >= other.global_accuracy.mean
    same = (one.gib.mean, one.global_accuracy.mean) == (other.gib.mean, other.global_accuracy.mean)
    return fewer and more and not same


def _cells(point: Point) -> list[str]:
    def percent(value: Estimate) -> str:
        return f"{100 * value.mean:.1f}" + (f" ± {100 * value.error:.1f}" if value.count > 1 else "")

    numbers = [percent(point.global_accuracy), percent(point.local_accuracy)]
    numbers += [f"{value.mean:#.3g}" for value in (point.gib, point.down, point.up)]
    mark = "*" if point.best else ""
    return [point.label, *numbers, f"{100 * point.sparsity.mean:.1f}", str(point.gib.count), mark]


def table_of_points(title: str, points: Sequence[Point]) -> Table:
    """The points ordered by bytes, with those on the front in bold."""
    ordered = _by_bytes(points)
    strong = [number for number, point in enumerate(ordered) if point.best]
    return Table(HEADER, [_cells(point) for point in ordered], title, MEANS, strong=strong)


def _by_bytes(points: Sequence[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.gib.mean)


def draw(points: Sequence[Point], references: Sequence[Reference] = ()) -> "Figure":
    """Global accuracy above local accuracy, against total GiB on a logarithmic axis, with the front as a line."""
    with figure_style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        figure = Figure((1.5 * COLUMN, 4.8), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True)
        for axes, kind in zip(panels, ("global", "local"), strict=True):
            _scatter(axes, points, kind)
            _mark(axes, references, kind)
            axes.set_ylabel(f"{kind} accuracy (%)")
        front = [point for point in _by_bytes(points) if point.best]
        panels[0].plot(
            [point.gib.mean for point in front],
            [100 * point.global_accuracy.mean for point in front],
            color="#999999",
            linewidth=0.9,
            zorder=0,
            label="front",
        )
        panels[1].set(xscale="log", xlabel="GiB communicated in the whole run")
        panels[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panels[1].xaxis.set_minor_formatter(NullFormatter())
        figure.set_figheight(4.2 + legend_height(panels[0].get_legend_handles_labels()[1], 1.5 * COLUMN))
        draw_legend(figure, panels[0])
    return figure


def _scatter(axes: "Axes", points: Sequence[Point], kind: str) -> None:
    """Draw the points with their standard errors: a colour per family, a mark per wire, grey where beaten."""
    wires = list(dict.fromkeys(point.wire for point in points))
    for number, family in enumerate(dict.fromkeys(point.family for point in points)):
        axes.plot([], [], "o", markersize=4, color=PALETTE[number % len(PALETTE)], label=family)
        for point in (point for point in points if point.family == family):
            value: Estimate = getattr(point, f"{kind}_accuracy")
            axes.errorbar(
                [point.gib.mean],
                [100 * value.mean],
                [100 * value.error if value.count > 1 else 0.0],
                fmt=MARKERS[wires.index(point.wire) % len(MARKERS)],
                markersize=4,
                color=PALETTE[number % len(PALETTE)] if point.best else GREY,
                markeredgecolor=PALETTE[number % len(PALETTE)],
                markeredgewidth=0.8,
                zorder=3 if point.best else 2,
            )
    for place, wire in enumerate(wires) if len(wires) > 1 else ():
        mark = MARKERS[place % len(MARKERS)]
        axes.plot([], [], mark, markersize=4, color="white", markeredgecolor="#555555", label=f"{wire} messages")
    if not all(point.best for point in points):
        axes.plot([], [], "o", markersize=4, color=GREY, markeredgecolor="#555555", label="beaten in both")


def _mark(axes: "Axes", references: Sequence[Reference], kind: str) -> None:
    """Draw published points, a mark each: the legend names them, so that no name lies on a point."""
    for number, one in enumerate(references):
        value: float | None = getattr(one, f"{kind}_accuracy")
        axes.plot(
            [one.gib] if value is not None else [],
            [value] if value is not None else [],
            linestyle="none",
            marker=PUBLISHED[number % len(PUBLISHED)],
            markersize=5,
            markeredgewidth=1.1,
            color="#555555",
            label=f"paper: {one.label}",
        )
