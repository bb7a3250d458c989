"""A legend above a figure's panels that fits its width, whatever the names are."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = 7
"""Of its text, in points."""
HANDLE = 2.5 + 0.5
"""The length of a line's sample and the gap to its name, in sizes of text."""
GAP = 1.0
"""Between two columns, in sizes of text."""
LONGEST = 48
"""Names longer than this have several lines."""


def draw_legend(figure: "Figure", axes: "Axes", most: int = 3) -> None:
    """Put the legend above the panels, filled row by row, in as many columns as fit, at most so many."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    columns = legend_columns(labels, figure.get_figwidth(), most)
    order = [i for first in range(columns) for i in range(first, len(labels), columns)]
    figure.legend(
        [handles[i] for i in order],
        [fill(labels[i], LONGEST) for i in order],
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        handlelength=2.5,
        handletextpad=0.5,
        columnspacing=GAP,
    )


def legend_columns(labels: Sequence[str], width: float, most: int = 3) -> int:
    """As many columns as fit a figure of this width in inches."""
    from matplotlib.textpath import TextPath

    # The text, its sample, and room at both edges.
    known = [TextPath((0, 0), label, size=SIZE).get_extents().width + HANDLE * SIZE for label in labels]
    for columns in range(most, 1, -1):
        widest = [max(known[first::columns], default=0.0) for first in range(columns)]
        if sum(widest) + GAP * SIZE * (columns - 1) + 2 * SIZE <= 72 * width:
            return columns
    return 1


def legend_height(labels: Sequence[str], width: float, most: int = 3) -> float:
    """About how many inches the legend takes."""
    lines = sum(fill(label, LONGEST).count("\n") + 1 for label in labels)
    return 0.14 * lines / legend_columns(labels, width, most)
