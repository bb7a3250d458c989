"""From folders to a report: gather the runs, write the page and, if asked, figures and tables."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedprior.core.errors import RunError
from fedprior.core.files import write_atomically
from fedprior.report import figures, layers
from fedprior.report.names import told_apart
from fedprior.report.page import write_page
from fedprior.report.reading import FILES
from fedprior.report.records import Broken, Found, Run, find_runs, group_runs, read_run
from fedprior.report.run_tables import numbers_of_runs, table_of_runs
from fedprior.report.table import write_tables


def gather(paths: Sequence[Path]) -> Found:
    """The runs in these folders, or under them, each once and told apart; a folder without any is named."""
    found = Found()
    for path in paths:
        is_run = any((path / name).exists() for name in FILES)
        under = Found() if is_run or not path.is_dir() else find_runs(path)
        if is_run:
            one = read_run(path)
            under = Found([one], []) if isinstance(one, Run) else Found([], [one])
        elif not under.runs and not under.broken:
            under.broken.append(Broken(path, _why_none(path)))
        seen = {run.path.resolve() for run in found.runs}
        found.runs.extend(run for run in under.runs if run.path.resolve() not in seen)
        found.broken.extend(under.broken)
    return Found(told_apart(found.runs), found.broken)


def _why_none(path: Path) -> str:
    """Why there is no run in a place."""
    if path.is_dir():
        return "holds no runs"
    return f"is a file; give the run's folder, such as {path.parent}" if path.exists() else "does not exist"


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    figures_to: Path | None = None,
    tables_to: Path | None = None,
    repeat: Callable[[Run], str] | None = None,
) -> tuple[list[Path], list[Broken]]:
    """The files that were written, the page first, and the folders that could not be read."""
    found = gather(paths)
    if not found.runs:
        raise RunError("there is nothing to report: " + "; ".join(f"{b.path}: {b.reason}" for b in found.broken))
    write_page(out, found.runs, found.broken, repeat)
    written = [out]
    if tables_to:
        written += write_tables(tables_to, table_of_runs(found.runs), numbers_of_runs(found.runs))
        if counted := layers.with_layers(group_runs(found.runs)):
            write_atomically(tables_to / "layers.md", layers.table_of_layers(counted).markdown())
            written.append(tables_to / "layers.md")
    if figures_to:
        held = {one.fingerprint: one for run in found.runs if (one := run.partition) and one.classes}
        written += figures.write_figures(figures_to, figures_of(found.runs), partitions=list(held.values()))
    return written, found.broken


def figures_of(runs: Sequence[Run]) -> figures.Asked:
    """The figures that the records allow, in the style of the paper."""
    groups = group_runs(runs)
    evaluated = [group for group in groups if len(group.curve("global_accuracy").x)]
    return {
        "accuracy-bytes": (figures.accuracy_against_bytes, evaluated),
        "accuracy-rounds": (figures.accuracy_against_rounds, evaluated),
        "sparsity": (figures.sparsity_over_rounds, [group for group in groups if group.final("sparsity").mean > 0]),
        "units": (layers.units_over_rounds, layers.with_layers(groups)),
        "gate-agreement": (figures.total_variation, [group for group in groups if len(group.curve("tv_mean").x)]),
    }
