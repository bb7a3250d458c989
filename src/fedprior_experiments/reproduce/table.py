"""The table of an experiment: ours, mean ± standard error over seeds, and the paper's cell beside each.

Accuracies are means over the last 5% of rounds; the CSV has the last evaluation as well.
"""

import csv as csv_format
import io
import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from fedprior.core.late import MEANS
from fedprior.report.records import Estimate, Group
from fedprior_experiments.reproduce.experiments import Cell, Experiment, Method

COLUMNS = {"global_accuracy": "global %", "local_accuracy": "local %", "gib": "GiB", "sparsity": "sparsity %"}
ACCURACIES = ("global_accuracy", "local_accuracy")
NONE = "–"


def terminal(title: str, experiment: Experiment, groups: Sequence[Group]) -> Table:
    """For a terminal."""
    made = Table(title=title, title_justify="left", caption=MEANS, caption_justify="left", box=box.SIMPLE_HEAD)
    made.pad_edge, made.collapse_padding = False, True
    for number, name in enumerate(_header()):
        style = "dim" if name == "paper" else ""
        justify: JustifyMethod = "left" if number == 0 else "right"
        made.add_column(name, justify=justify, style=style, no_wrap=number == 0, overflow="fold")
    for row in _rows(experiment, groups):
        made.add_row(*(cell.replace(" ± ", "±") for cell in row))  # ten columns must fit a page of 120 letters
    return made


def markdown(title: str, experiment: Experiment, groups: Sequence[Group], notes: Iterable[str]) -> str:
    """For a document; notes stand below."""
    header = _header()
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *_rows(experiment, groups)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    below = "".join(f"- {note}\n" for note in notes)
    return f"{title}\n\n{text}\n\n{MEANS}\n" + (f"\n{below}" if below else "")


def csv(experiment: Experiment, groups: Sequence[Group]) -> str:
    """For a program: full precision, nothing where there is no number."""
    by_label = {group.label: group for group in groups}
    file = io.StringIO()
    writer = csv_format.writer(file, lineterminator="\n")
    kinds = ("", "_error", "_paper", "_paper_error")
    header = [*(f"{name}{kind}" for name in COLUMNS for kind in kinds)]
    header += [f"{name}_last{kind}" for name in ACCURACIES for kind in kinds[:2]]
    writer.writerow(["label", "seeds", *header])
    for method in experiment.methods:
        group = by_label.get(method.label)
        row: list[object] = [method.label, len(group.runs) if group else 0]
        for name in COLUMNS:
            paper = _paper(method, name)
            row += _numbers(_estimate(group, name))
            row += [paper.mean, paper.error if paper.error is not None else ""] if paper else ["", ""]
        for name in ACCURACIES:
            row += _numbers(_estimate(group, name, last=True))
        writer.writerow(row)
    return file.getvalue()


def _numbers(estimate: Estimate | None) -> list[float | str]:
    """Mean and error; nothing where there is no number."""
    return ["" if math.isnan(x) else x for x in (estimate.mean, estimate.error)] if estimate else ["", ""]


def latex(experiment: Experiment, groups: Sequence[Group]) -> str:
    """For a paper, with booktabs."""
    lines = [
        f"% {MEANS.replace('%', ' percent')}",
        rf"\begin{{tabular}}{{l{'rr' * len(COLUMNS)}r}}",
        r"\toprule",
        " & ".join(["method", *(f"{name} & paper" for name in COLUMNS.values()), "seeds"]).replace("%", r"\%") + r" \\",
        r"\midrule",
    ]
    for row in _rows(experiment, groups):
        cells = [_latex_cell(cell) for cell in row]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cell(text: str) -> str:
    if text == NONE:
        return "--"
    mean, plus, error = text.partition(" ± ")
    return rf"${mean}_{{\pm {error}}}$" if plus else text.replace("_", r"\_")


def _header() -> list[str]:
    return ["method", *(part for name in COLUMNS.values() for part in (name, "paper")), "seeds"]


def _rows(experiment: Experiment, groups: Sequence[Group]) -> list[list[str]]:
    by_label = {group.label: group for group in groups}
    rows = []
    for method in experiment.methods:
        group = by_label.get(method.label)
        row = [method.name]
        for name in COLUMNS:
            row += [_ours(_estimate(group, name), name), _cell(_paper(method, name))]
        rows.append([*row, str(len(group.runs)) if group else "0"])
    return rows


def _estimate(group: Group | None, name: str, *, last: bool = False) -> Estimate | None:
    """In the paper's units: percent and GiB; an accuracy late in training, or at the `last` evaluation."""
    if group is None:
        return None
    made = group.late(name) if name in ACCURACIES and not last else group.final(name)
    scale = 1 if name == "gib" else 100
    return Estimate(scale * made.mean, scale * made.error, made.count)


def _paper(method: Method, name: str) -> Cell | None:
    cell: Cell | None = getattr(method.paper, name)
    return cell


def _ours(estimate: Estimate | None, name: str) -> str:
    if estimate is None or math.isnan(estimate.mean):
        return NONE
    # A few rounds of a small network are hundredths of a GiB.
    digits = 3 if name == "gib" and estimate.mean < 1 else 2 if name == "gib" and estimate.mean < 10 else 1
    mean = f"{estimate.mean:.{digits}f}"
    return mean if math.isnan(estimate.error) else f"{mean} ± {estimate.error:.{digits}f}"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return NONE
    return f"{cell.mean:g}" if cell.error is None else f"{_paperlike(cell.mean)} ± {_paperlike(cell.error)}"


def _paperlike(value: float) -> str:
    """As the paper prints it: whole GB, tenths of a percent."""
    return str(value) if isinstance(value, int) else f"{value:.1f}"
