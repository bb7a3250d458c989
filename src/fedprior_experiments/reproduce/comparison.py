"""The table of an experiment: our mean ± standard error over seeds, with the paper's cell beside each.

Accuracies are means over the last 5% of rounds; the CSV has the last evaluation as well.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table as RichTable

from fedprior.core.late import MEANS
from fedprior.report.records import Estimate, Group
from fedprior.report.table import Table
from fedprior_experiments.reproduce.experiments import Cell, Experiment, Method

COLUMNS = {"global_accuracy": "global %", "local_accuracy": "local %", "gib": "GiB", "sparsity": "sparsity %"}
ACCURACIES = ("global_accuracy", "local_accuracy")
NONE = "–"


def comparison(title: str, experiment: Experiment, groups: Sequence[Group], notes: Sequence[str] = ()) -> Table:
    """Return one row per method, for a document, a paper or, through `terminal`, a terminal."""
    header = ["method", *(part for name in COLUMNS.values() for part in (name, "paper")), "seeds"]
    rows = []
    for method, group in _methods(experiment, groups):
        pairs = [(_ours(_estimate(group, name), name), _cell(_paper(method, name))) for name in COLUMNS]
        rows.append([method.name, *(cell for pair in pairs for cell in pair), str(len(group.runs)) if group else "0"])
    return Table(header, rows, title, MEANS, notes, soft=("paper",))


def terminal(table: Table) -> RichTable:
    """Fit ten columns into a width of 120 characters."""
    narrow = [[cell.replace(" ± ", "±") for cell in row] for row in table.rows]
    return replace(table, rows=narrow).terminal(whole=True, pad_edge=False, collapse_padding=True)


def numbers(experiment: Experiment, groups: Sequence[Group]) -> Table:
    """Return the same table for a program, in full precision."""
    kinds = ("", "_error", "_paper", "_paper_error")
    header = ["label", "seeds", *(f"{name}{kind}" for name in COLUMNS for kind in kinds)]
    header += [f"{name}_last{kind}" for name in ACCURACIES for kind in kinds[:2]]
    rows = []
    for method, group in _methods(experiment, groups):
        row: list[object] = [method.label, len(group.runs) if group else 0]
        for name in COLUMNS:
            row += [*_numbers(_estimate(group, name)), *_numbers(_paper(method, name))]
        for name in ACCURACIES:
            row += _numbers(_estimate(group, name, last=True))
        rows.append(row)
    return Table(header, rows)


def _methods(experiment: Experiment, groups: Sequence[Group]) -> Iterator[tuple[Method, Group | None]]:
    by_label = {group.label: group for group in groups}
    return ((method, by_label.get(method.label)) for method in experiment.methods)


def _numbers(value: Estimate | Cell | None) -> list[float | None]:
    """Return mean and error, if there are any."""
    return [value.mean, value.error] if value else [None, None]


def _estimate(group: Group | None, name: str, *, last: bool = False) -> Estimate | None:
    """Return an estimate in percent or GiB; accuracies are late in training or at the `last` evaluation."""
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
    # A few rounds of a small network take only hundredths of a GiB.
    digits = 3 if name == "gib" and estimate.mean < 1 else 2 if name == "gib" and estimate.mean < 10 else 1
    mean = f"{estimate.mean:.{digits}f}"
    return mean if math.isnan(estimate.error) else f"{mean} ± {estimate.error:.{digits}f}"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return NONE
    return f"{cell.mean:g}" if cell.error is None else f"{_paperlike(cell.mean)} ± {_paperlike(cell.error)}"


def _paperlike(value: float) -> str:
    """Format a value as the paper prints it: whole GB, tenths of a percent."""
    return str(value) if isinstance(value, int) else f"{value:.1f}"
