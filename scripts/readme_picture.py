"""The README's picture, from a real comparison: accuracy for the megabytes it cost, and where the network went.

fedprior compare mnist-mini --algorithms fedavg,fedsparse --out runs/readme
python scripts/readme_picture.py runs/readme docs/compare.svg
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedprior.report import Run, find_runs
from fedprior.report.figures import STYLE

COLOURS = ("#57606a", "#d9480f", "#1f6feb", "#0f8a5f", "#a8328f")


def accuracy(axes: Axes, runs: list[Run], field: str, title: str) -> None:
    """A line a run against everything sent so far, and what it came to in its colour."""
    for number, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        series, sent = run.series(field), run.series("gib")
        megabytes = [sent[r] * 2**30 / 1e6 for r in series]
        values = [100 * v for v in series.values()]
        axes.plot(megabytes, values, color=colour, marker="o", markersize=2.4)
        label = f"{run.label}: {values[-1]:.1f}% for {megabytes[-1]:,.0f} MB"
        place = (0.98, 0.05 + 0.1 * (len(runs) - 1 - number))
        axes.text(*place, label, transform=axes.transAxes, color=colour, ha="right")
    axes.set(title=title, xlabel="MB sent, both directions", ylabel="%", xlim=(0, None), ylim=(85, 100))


def layers(axes: Axes, run: Run) -> None:
    """The share of each layer's weights that is left over rounds."""
    names = [key for key in run.rounds[-1] if key.startswith("sparsity/")]
    ends: list[float] = []
    for name, colour in zip(names, COLOURS[1:], strict=False):
        series = run.series(name)
        left = [100.0, *(100 * (1 - v) for v in series.values())]
        axes.plot([0, *series], left, color=colour)
        height = next(h for h in np.arange(left[-1], 200, 1.0) if all(abs(h - other) >= 7 for other in ends))
        ends.append(height)
        label = f"{name.removeprefix('sparsity/')} {left[-1]:.0f}%"
        axes.annotate(
            label, (max(series), height), (4, -2), textcoords="offset points", color=colour, annotation_clip=False
        )
    axes.set(title=f"{run.label}: weights left, by layer", xlabel="round", ylabel="%", xlim=(0, None), ylim=(0, 104))


def main(folder: str, out: str) -> None:
    """Draw the runs under a folder."""
    runs = find_runs(folder).runs
    with rc_context({**STYLE, "svg.fonttype": "path", "axes.titleweight": "bold"}):
        figure = Figure((9.2, 2.5), layout="constrained", facecolor="white")
        first, second, third = figure.subplots(1, 3, width_ratios=(1.15, 1.15, 0.9))
        accuracy(first, runs, "global_accuracy", "the server's model, everyone's test images")
        accuracy(second, runs, "local_accuracy", "the clients' own models, their own images")
        layers(third, max(runs, key=lambda run: run.final("sparsity")))
        figure.savefig(Path(out), metadata={"Date": None} if out.endswith(".svg") else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
