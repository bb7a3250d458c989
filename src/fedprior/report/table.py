"""One table of runs: accuracies, megabytes, sparsity."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedprior.late import MEANS

COLUMNS = ("run", "global acc.", "local acc.", "MB up", "MB down", "sparsity", "parameters", "seconds")


def rows(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells of the table, one row a run, with its seed where they have several."""
    several = len(_seeds(summaries)) > 1
    return [
        [
            f"{s['label']} ({s['seed']})" if several else str(s["label"]),
            _percent(_late(s, "global_accuracy")),
            _percent(_late(s, "local_accuracy")),
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
    table = Table(
        title=_title(summaries), title_justify="left", caption=MEANS, caption_justify="left", box=box.SIMPLE_HEAD
    )
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows(summaries):
        table.add_row(*row)
    return table


def markdown_table(summaries: Sequence[dict[str, Any]]) -> str:
    """The same table for a file."""
    return f"{_title(summaries)}\n\n{markdown_lines(COLUMNS, rows(summaries))}\n{MEANS}\n"


def markdown_lines(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    lines += [[cell.replace("|", "\\|") for cell in line] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _title(summaries: Sequence[dict[str, Any]]) -> str:
    if not summaries:
        return "no run was finished"
    s, seeds = summaries[0], ", ".join(map(str, _seeds(summaries)))
    return f"{s['task']}, {s['rounds']} rounds, seed {seeds}, {s['device']}, fedprior {s['version']}"


def _seeds(summaries: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({s["seed"] for s in summaries if "seed" in s})


def _late(summary: dict[str, Any], name: str) -> float | None:
    """The mean of the last 5% of rounds; of a summary that is older than that, the last evaluation."""
    found: float | None = summary.get(f"{name}_late", summary[name])
    return found


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.1f}%"
