"""One table of runs: accuracies, megabytes, sparsity."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

COLUMNS = ("run", "global acc.", "local acc.", "MB up", "MB down", "sparsity", "parameters", "seconds")


def rows(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells of the table, one row a run."""
    return [
        [
            str(s["label"]),
            _percent(s["global_accuracy"]),
            _percent(s["local_accuracy"]),
            f"{s['bytes_up'] / 1e6:,.1f}",
            f"{s['bytes_down'] / 1e6:,.1f}",
            _percent(s["sparsity"]),
            "–" if s["effective_parameters"] is None else f"{s['effective_parameters']:,}",
            "–" if s["seconds"] is None else f"{s['seconds']:,.1f}",
        ]
        for s in summaries
    ]


def summary_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """The table for a terminal."""
    table = Table(title=_title(summaries), title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows(summaries):
        table.add_row(*row)
    return table


def markdown_table(summaries: Sequence[dict[str, Any]]) -> str:
    """The same table for a file."""
    lines = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1), *rows(summaries)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{_title(summaries)}\n\n{table}\n"


def _title(summaries: Sequence[dict[str, Any]]) -> str:
    s = summaries[0]
    return f"{s['task']}, {s['rounds']} rounds, seed {s['seed']}, {s['device']}, fedprior {s['version']}"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.1f}%"
