"""From folders to a report: gather the runs, write the page, and if asked figures and tables."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedprior.core.errors import RunError
from fedprior.report import figures
from fedprior.report.names import told_apart
from fedprior.report.page import write_page
from fedprior.report.reading import FILES
from fedprior.report.records import Broken, Found, Run, find_runs, group_runs, read_run
from fedprior.report.tables import write_tables


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
            under.broken.append(Broken(path, "holds no runs" if path.is_dir() else "does not exist"))
        seen = {run.path.resolve() for run in found.runs}
        found.runs.extend(run for run in under.runs if run.path.resolve() not in seen)
        found.broken.extend(under.broken)
    return Found(told_apart(found.runs), found.broken)


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
        written += write_tables(tables_to, found.runs)
    if figures_to:
        written += write_figures(figures_to, found.runs)
    return written, found.broken


def write_figures(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Figures in the style of the paper, as far as there are records for them."""
    groups = group_runs(runs)
    evaluated = [group for group in groups if len(group.curve("global_accuracy").x)]
    sparse = [group for group in groups if group.final("sparsity").mean > 0]
    gated = [group for group in groups if len(group.curve("tv_mean").x)]
    partitions = {run.partition.fingerprint: run.partition for run in runs if run.partition and run.partition.classes}
    drawn = {}
    if evaluated:
        drawn["accuracy-bytes"] = figures.accuracy_against_bytes(evaluated)
        drawn["accuracy-rounds"] = figures.accuracy_against_rounds(evaluated)
    if sparse:
        drawn["sparsity"] = figures.sparsity_over_rounds(sparse)
    if gated:
        drawn["gate-agreement"] = figures.total_variation(gated)
    for number, partition in enumerate(partitions.values()):
        drawn[f"partition-{number}" if number else "partition"] = figures.partition_picture(partition)
    return [path for name, figure in drawn.items() for path in figures.save(figure, folder, name)]
