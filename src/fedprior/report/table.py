"""One table of runs: accuracies, megabytes, sparsity."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fedprior.core.late import MEANS

COLUMNS = ("run", "global acc.", "local acc.", "MB up", "MB down", "sparsity", "parameters", "seconds")


SCORES = ("global_", "local_")
"""How the names of what was measured on test examples begin."""


def more_scores(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What else is shown of these runs: metrics of a user's own, and the loss where a run has no accuracy."""
    accurate = all(s.get("global_accuracy") is not None for s in summaries)
    usual = {"accuracy", "loss"} if accurate else {"accuracy"}
    found = [key for s in summaries for key in s if key.startswith(SCORES) and not key.endswith("_late")]
    names = dict.fromkeys(key.split("_", 1)[1] for key in found)
    return [f"{prefix}{name}" for name in names if name not in usual for prefix in SCORES]


def columns(more: Sequence[str]) -> list[str]:
    """The table's header; `global_mae` is headed "global mae"."""
    return [*COLUMNS, *(name.replace("_", " ", 1) for name in more)]


def score(value: Any) -> str:
    """A measured number in four digits."""
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else "–"


def rows(summaries: Sequence[Mapping[str, Any]], more: Sequence[str] | None = None) -> list[list[str]]:
    """The cells of the table, one row a run, with its seed where they have several."""
    more = more_scores(summaries) if more is None else more
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
            *(score(s.get(name)) for name in more),
        ]
        for s in summaries
    ]


def summary_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """The table for a terminal."""
    table = Table(
        title=_title(summaries), title_justify="left", caption=MEANS, caption_justify="left", box=box.SIMPLE_HEAD
    )
    for i, column in enumerate(columns(more_scores(summaries))):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows(summaries):
        table.add_row(*row)
    return table


def markdown_table(summaries: Sequence[dict[str, Any]]) -> str:
    """The same table for a file."""
    lines = markdown_lines(columns(more_scores(summaries)), rows(summaries))
    return f"{_title(summaries)}\n\n{lines}\n{MEANS}\n"


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


def _seeds(summaries: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({s["seed"] for s in summaries if "seed" in s})


def _late(summary: Mapping[str, Any], name: str) -> float | None:
    """The mean of the last 5% of rounds; of a summary that is older than that, the last evaluation."""
    found: float | None = summary.get(f"{name}_late", summary.get(name))
    return found


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.1f}%"
