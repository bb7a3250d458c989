"""Tables of runs, finished or not: accuracies, megabytes and sparsity; and, for programs, their plain numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table as RichTable

from fedprior.core.errors import counted
from fedprior.core.late import MEANS, is_number
from fedprior.report.reading import round_seconds
from fedprior.report.records import Run
from fedprior.report.table import Table

COLUMNS = ("run", "global acc.", "local acc.", "MB up", "MB down", "sparsity", "parameters", "seconds")
SCORES = ("global_", "local_")
"""Prefixes of the names of what was measured on test examples."""
APART = ("unseen_", "newcomer_")
"""The same of clients that never took part."""
ACCURACIES = ("global_accuracy", "local_accuracy")
PERCENT = (*ACCURACIES, *(f"{who}accuracy" for who in APART))
USUAL = ("nll", "ece", "brier")
LATE = tuple(f"{name}_late" for name in ACCURACIES)
NUMBERS = (*ACCURACIES, *LATE, "bytes_up", "bytes_down", "sparsity")
SIZES = ("parameters", "effective_parameters", "seconds")


# ---------------------------------------------------------------------- of summaries


def table_of_summaries(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """One row per run, with its seed if there are several."""
    more, seeds = _more_scores(summaries), sorted({s["seed"] for s in summaries if "seed" in s})
    title = "no run was finished"
    if summaries:
        s, named = summaries[0], ", ".join(map(str, seeds))
        title = f"{s['task']}, {counted(s['rounds'], 'round')}, seed {named}, {s['device']}, fedprior {s['version']}"
    rows = [_cells(s, more) for s in summaries]
    for row, s in zip(rows, summaries, strict=True) if len(seeds) > 1 else ():
        row[0] += f" ({s['seed']})"
    return Table(_header(more), rows, title, MEANS)


def summary_table(summaries: Sequence[Mapping[str, Any]]) -> RichTable:
    """The table for a terminal."""
    return table_of_summaries(summaries).terminal()


def markdown_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The same table for a file."""
    return table_of_summaries(summaries).markdown()


def score(value: Any) -> str:
    """A measured number with four digits."""
    return f"{value:.4g}" if is_number(value) else "–"


def shown_score(name: str, value: Any) -> str:
    """The same, or percent of an accuracy, as in the columns that every table has."""
    return _percent(value) if name in PERCENT and is_number(value) else score(value)


def _more_scores(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What else to show of these runs: the user's own metrics, and the loss where a run has no accuracy.

    What every run has beside its accuracy is on the page, and in the numbers for programs.
    """
    accurate = all(s.get("global_accuracy") is not None for s in summaries)
    usual = {"accuracy", "loss", *USUAL} if accurate else {"accuracy", *USUAL}
    found = [key for s in summaries for key in s if key.startswith(SCORES) and not key.endswith("_late")]
    names = dict.fromkeys(key.split("_", 1)[1] for key in found)
    shown = [f"{prefix}{name}" for name in names if name not in usual and not of_clients(name) for prefix in SCORES]
    apart = "accuracy" if accurate else "loss"
    return shown + [name for name in (f"unseen_{apart}", f"newcomer_{apart}") if any(name in s for s in summaries)]


def of_clients(name: str) -> bool:
    """Whether a score says how unequal clients are."""
    return name.endswith(("_worst", "_spread"))


def _header(more: Sequence[str]) -> list[str]:
    """The table's header; the column of `global_mae` is "global mae"."""
    return [*COLUMNS, *(name.replace("_", " ", 1) for name in more)]


def _cells(s: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    return [
        str(s["label"]),
        *(_percent(s.get(f"{name}_late", s.get(name))) for name in ACCURACIES),  # older summaries have no `late`
        f"{s['bytes_up'] / 1e6:,.1f}",
        f"{s['bytes_down'] / 1e6:,.1f}",
        _percent(s["sparsity"]),
        "–" if s["effective_parameters"] is None else f"{s['effective_parameters']:,}",
        "–" if s["seconds"] is None else f"{s['seconds']:,.1f}",
        *(shown_score(name, s.get(name)) for name in more),
    ]


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.1f}%"


# ---------------------------------------------------------------------- of runs


def table_of_runs(runs: Sequence[Run]) -> Table:
    """One row per run, with its seed and rounds, for a document or a paper."""
    more = more_of(runs)
    return Table(header(more), [cells(run, more) for run in runs], caption=MEANS)


def numbers_of_runs(runs: Sequence[Run]) -> Table:
    """The numbers as recorded."""
    summaries = [summary_of(run) for run in runs]
    found = dict.fromkeys(name for summary in summaries for name in summary if name.startswith(SCORES))
    names = (*NUMBERS, *SIZES, *(name for name in found if name not in NUMBERS))
    about = ("folder", "task", "algorithm", "label", "seed", "rounds", "finished")
    rows = [
        [run.path, run.task, run.algorithm, run.label, run.seed, len(run.rounds), str(run.finished).lower()]
        + [summary.get(name) for name in names]
        for run, summary in zip(runs, summaries, strict=True)
    ]
    return Table([*about, *names], rows)


def summary_of(run: Run) -> dict[str, Any]:
    """The run's summary; for an unfinished run, what its records say so far."""
    seconds = round_seconds(run.path)
    scores = dict.fromkeys(key for record in run.rounds for key in record if key.startswith((*SCORES, *APART)))
    found = {
        "label": run.label,
        **{name: run.final(name) for name in (*scores, "sparsity")},
        **{f"{name}_late": run.late(name) for name in ACCURACIES if name in scores},
        **{name: sum(record[name] for record in run.rounds) for name in ("bytes_up", "bytes_down")},
        **dict.fromkeys(SIZES),
        "seconds": sum(seconds.values()) if seconds else None,
    }
    numbers = (*SIZES, *SCORES)
    recorded = {k: v for k, v in (run.summary or {}).items() if not k.startswith(numbers) or is_number(v, finite=False)}
    return {**found, **recorded, "label": run.label, "rounds": len(run.rounds)}


def more_of(runs: Sequence[Run]) -> list[str]:
    """What to show of these runs besides the usual columns."""
    return _more_scores([summary_of(run) for run in runs if run.rounds])


def header(more: Sequence[str]) -> list[str]:
    """The table's header, with the seed and the rounds."""
    first, *rest = _header(more)
    return [first, "seed", "rounds", *rest]


def cells(run: Run, more: Sequence[str] = ()) -> list[str]:
    """One row of the table, under `header`."""
    first, *rest = _cells(summary_of(run), more)
    return [first, str(run.seed), f"{len(run.rounds):,}", *rest]
