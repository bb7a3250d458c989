"""The table of any runs, finished or not: its cells, and as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedprior.core.files import write_atomically, writing
from fedprior.core.late import MEANS
from fedprior.report.reading import round_seconds
from fedprior.report.records import Run
from fedprior.report.table import SCORES, columns, markdown_lines, more_scores, rows

ACCURACIES = ("global_accuracy", "local_accuracy")
LATE = tuple(f"{name}_late" for name in ACCURACIES)
NUMBERS = (*ACCURACIES, *LATE, "bytes_up", "bytes_down", "sparsity")
SIZES = ("parameters", "effective_parameters", "seconds")
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


def summary_of(run: Run) -> dict[str, Any]:
    """The run's summary; of an unfinished run, what its records say so far."""
    seconds = round_seconds(run.path)
    found = {
        "label": run.label,
        **{name: run.final(name) for name in (*_scores(run), "sparsity")},
        **{f"{name}_late": run.late(name) for name in ACCURACIES if name in _scores(run)},
        **{name: sum(record[name] for record in run.rounds) for name in ("bytes_up", "bytes_down")},
        **dict.fromkeys(SIZES),
        "seconds": sum(seconds.values()) if seconds else None,
    }
    recorded = {k: v for k, v in (run.summary or {}).items() if k not in SIZES or isinstance(v, int | float)}
    return {**found, **recorded, "label": run.label, "rounds": len(run.rounds)}


def _scores(run: Run) -> list[str]:
    """What was measured on test examples, as far as it has been evaluated."""
    return list(dict.fromkeys(key for record in run.rounds for key in record if key.startswith(SCORES)))


def more_of(runs: Sequence[Run]) -> list[str]:
    """What is shown of these runs beside the usual."""
    return more_scores([summary_of(run) for run in runs if run.rounds])


def header(more: Sequence[str]) -> list[str]:
    """The table's, with the seed and the rounds."""
    first, *rest = columns(more)
    return [first, "seed", "rounds", *rest]


def cells(run: Run, more: Sequence[str] = ()) -> list[str]:
    """One row of the table, under `header`."""
    first, *rest = rows([summary_of(run)], more)[0]
    return [first, str(run.seed), f"{len(run.rounds):,}", *rest]


def markdown(runs: Sequence[Run]) -> str:
    """A table for a README."""
    more = more_of(runs)
    return f"{markdown_lines(header(more), [cells(run, more) for run in runs])}\n{MEANS}\n"


def latex(runs: Sequence[Run]) -> str:
    """A table for a paper; needs the package booktabs."""
    more = more_of(runs)
    lines = [
        " & ".join("".join(LATEX.get(c, c) for c in cell) for cell in line)
        for line in (header(more), *(cells(run, more) for run in runs))
    ]
    body = " \\\\\n".join(lines[1:])
    form = "l" + "r" * (len(header(more)) - 1)
    return (
        f"% {MEANS.replace('%', ' percent')}\n"
        f"\\begin{{tabular}}{{{form}}}\n\\toprule\n{lines[0]} \\\\\n\\midrule\n{body} \\\\\n\\bottomrule\n"
        "\\end{tabular}\n"
    )


def comma_separated(runs: Sequence[Run]) -> str:
    """Numbers as they were recorded, for another program; empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    found = dict.fromkeys(name for run in runs for name in summary_of(run) if name.startswith(SCORES))
    scores = [name for name in found if name not in NUMBERS]
    writer.writerow(["folder", "task", "algorithm", "label", "seed", "rounds", "finished", *NUMBERS, *SIZES, *scores])
    for run in runs:
        summary = summary_of(run)
        about = [run.path, run.task, run.algorithm, run.label, run.seed, len(run.rounds), str(run.finished).lower()]
        numbers = [summary.get(name) for name in (*NUMBERS, *SIZES, *scores)]
        writer.writerow([*about, *("" if v is None or v != v else v for v in numbers)])
    return text.getvalue()


def write_tables(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """table.md, table.tex and table.csv."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {"table.md": markdown(runs), "table.tex": latex(runs), "table.csv": comma_separated(runs)}
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [folder / name for name in texts]
