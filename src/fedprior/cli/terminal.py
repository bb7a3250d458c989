"""What the commands print, and where."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from fedprior.core.errors import DivergedError, FedpriorError, counted

if TYPE_CHECKING:
    from fedprior.report.progress import RunProgress
    from fedprior.runs.drive import Result
    from fedprior.runs.specs import Spec
    from fedprior.runs.sweeps import Outcome

# Output piped to a file need not fit a terminal of 80 columns.
# Labels and paths are shown verbatim, including brackets.
console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
errors = Console(stderr=True)


def bar(group: "list[Spec]", rounds: int) -> "RunProgress":
    """One bar for specs that train together."""
    from fedprior.report.progress import RunProgress

    label = group[0].label if len(group) == 1 else f"{group[0].algorithm} × {len(group)}"
    return RunProgress(console, label, rounds)


def name_diverged(outcomes: "list[tuple[Spec, Outcome]]") -> None:
    """Print one line for each diverged run, on stderr."""
    for spec, outcome in outcomes:
        if isinstance(outcome, DivergedError):
            errors.print(
                f"[bold red]{escape(spec.label)}, seed {spec.seed}:[/] {escape(str(outcome))}",
                highlight=False,
                soft_wrap=True,
            )


def name_left_out(results: "list[Result]") -> None:
    """Print one line for each run in which uploads were left out, and whose."""
    for result in results:
        faults = [fault["client"] for record in result.records for fault in record.get("faults", ())]
        if faults:
            many = f"{counted(len(faults), 'upload')} of {counted(len(set(faults)), 'client')} were left out"
            where = f": see `faults` in {result.path / 'rounds.jsonl'}" if result.path else ""
            console.print(f"{result.summary['label']}: {many}, farther away than `bound` allows{where}", soft_wrap=True)


class Stopped(FedpriorError):
    """An interrupt; the text says how training goes on."""


@contextmanager
def stoppable(folder: Path, again: str = "") -> Iterator[None]:
    """Say of an interrupt how what is trained in this folder goes on: as a run, or with the same command `again`."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(f"the same `{again}` with --out {folder} continues" if again else _goes_on(folder)) from error


def _goes_on(folder: Path) -> str:
    from fedprior.runs.folder import RunFolder

    run = RunFolder(folder)
    if not run.config.exists():
        return f"{folder} has not begun"
    return f"`{run.again}` " + (
        "continues at its last checkpoint" if run.checkpoint.exists() else "starts it again, for want of a checkpoint"
    )


def conclude(summaries: list[dict[str, Any]], folder: Path) -> None:
    """Finish `compare` and `sweep` with a table and a page of the folder's runs."""
    from fedprior.core.files import write_atomically
    from fedprior.engines import ranks
    from fedprior.report import markdown_table, summary_table
    from fedprior.report.write import write_report
    from fedprior.runs.repeat import repeat_command

    console.print(summary_table(summaries))
    if ranks.first():
        write_atomically(folder / "table.md", markdown_table(summaries))
        write_report([folder], folder / "report.html", repeat=repeat_command)
    for name in ("table.md", "report.html"):
        console.print(f"{folder / name}", soft_wrap=True)
