"""Where the parameters went: the units that each layer keeps, as a table and, over rounds, as a figure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedprior.report.figures import COLUMN, Names, figure_style
from fedprior.report.legend import draw_legend
from fedprior.report.records import Group
from fedprior.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = "units/"
"""Precedes a layer's name in a record: how many of its units are open."""
NAMED = 8
"""With more layers than this, the figure's legend names only the first and the last."""


def layers_of(groups: Sequence[Group]) -> list[str]:
    """The layers whose units are counted, in the network's order."""
    found = (key for group in groups for run in group.runs for record in run.rounds for key in record)
    return [key.removeprefix(UNITS) for key in dict.fromkeys(found) if key.startswith(UNITS)]


def with_layers(groups: Sequence[Group]) -> list[Group]:
    """The groups whose records count units."""
    return [group for group in groups if layers_of([group])]


def most_of(groups: Sequence[Group], layer: str) -> float:
    """The most units that a layer had at an evaluation of any of these runs."""
    values = [value for group in groups for run in group.runs for value in run.series(UNITS + layer).values()]
    return max(values, default=0.0)


def table_of_layers(groups: Sequence[Group]) -> Table:
    """One row per layer, one column per label: the units at the end, means over seeds."""
    counted = with_layers(groups)
    rows = []
    for layer in layers_of(counted):
        ends = [group.final(UNITS + layer) for group in counted]
        rows.append([layer, f"{most_of(counted, layer):.0f}", *(_cell(end.mean) for end in ends)])
    caption = (
        "Units that each layer keeps at the end, means over seeds; `most` is the largest number at any evaluation."
    )
    return Table(["layer", "most", *(group.label for group in counted)], rows, caption=caption)


def _cell(mean: float) -> str:
    return "–" if mean != mean else f"{mean:.1f}".removesuffix(".0")


def units_over_rounds(groups: Sequence[Group], names: Names | None = None) -> "Figure":
    """One panel per label: the share of its units that each layer keeps, from the first layer (dark) to the last."""
    with figure_style():
        import matplotlib
        from matplotlib.figure import Figure

        layers, known = layers_of(groups), names or {}
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
        figure = Figure((COLUMN, 0.6 + 1.4 * len(groups)), layout="constrained")
        panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
        for axes, group in zip(panels, groups, strict=True):
            for number, (layer, shade) in enumerate(zip(layers, shades, strict=True)):
                curve = group.curve(UNITS + layer)
                text = layer if len(layers) <= NAMED or number in (0, len(layers) - 1) else None
                share = 100 * curve.mean / max(most_of(groups, layer), 1)
                axes.plot(curve.x, share, color=shade, label=text, marker="o", markevery=[-1], markersize=2.6)
            axes.set_title(known[group.label].text if group.label in known else group.label, loc="left")
            axes.set(ylabel="units kept (%)", ylim=(0, 105))
        panels[-1].set_xlabel("round")
        panels[-1].set_xlim(left=0)
        panels[-1].locator_params(axis="x", integer=True)
        draw_legend(figure, panels[0], most=4)
    return figure
