"""A live terminal view of runs in other processes, from the records they leave on disk."""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedprior.core.errors import RunError
from fedprior.core.locks import held
from fedprior.report.faults import faults_of
from fedprior.report.jumps import jumps, line
from fedprior.report.names import told_apart
from fedprior.report.reading import round_seconds
from fedprior.report.records import Broken, Run, folders_of_runs, read_run

BLOCKS = "▁▂▃▄▅▆▇█"
STALE = 60.0
"""Seconds without a record after which the view says so, of a process that is there."""


class Seen(NamedTuple):
    """A run, and whether a process trains it; none where the file system cannot tell."""

    run: Run | Broken
    held: bool | None = None

    @property
    def gone(self) -> bool:
        """Whether there is more to do and nobody to do it."""
        run = self.run
        return self.held is False and isinstance(run, Run) and not run.finished and not run.trouble

    @property
    def ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return isinstance(self.run, Broken) or self.run.finished or bool(self.run.trouble) or self.gone


def watch(path: Path, console: Console, *, once: bool = False, interval: float = 1.0) -> None:
    """Show a run, or every run under a folder, until all have ended; an interrupt ends it quietly."""
    if once:
        if not (found := look(path)):
            raise RunError(f"there is no run in {path}")
        console.print(view(path, found))
        return
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                found = look(path)
                live.update(view(path, found), refresh=True)
                if found and all(seen.ended for seen in found):
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def look(path: Path) -> list[Seen]:
    """The run in a folder, or those under it; none where nothing has started yet."""
    try:
        folders = [path] if (path / "config.toml").exists() else folders_of_runs(path)
    except OSError as error:
        return [Seen(Broken(path, f"cannot be listed: {error.strerror}"))]
    # Ask first and read then: a process that ends in between has written all that it had to say.
    trained = {folder: held(folder) for folder in folders}
    read = [read_run(folder) for folder in folders]
    shown: list[Run | Broken] = [*told_apart([run for run in read if isinstance(run, Run)])]
    shown += [run for run in read if isinstance(run, Broken)]
    return [Seen(run, trained[run.path]) for run in shown]


def view(path: Path, found: Sequence[Seen]) -> RenderableType:
    """One row per run; below, the course of its accuracy, its last fault, and how to continue one that stopped."""
    if not found:
        return Text(f"waiting for a run in {path}")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("run", "round", "", "global", "local", "sparsity", "loss", "MB", "s/round", "state"):
        numeric = column not in ("run", "", "state")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    lines: list[RenderableType] = [table]
    for seen in found:
        if isinstance(seen.run, Broken):
            lines.append(Text(f"{seen.run.path}: {seen.run.reason}", style="red"))
            continue
        _add_row(table, seen.run, gone=seen.gone)
        lines += _course(seen.run)
        if faults := faults_of(seen.run):
            lines.append(Text(f"  {seen.run.label}  {faults.line()}", style="yellow"))
        if jumped := jumps(seen.run.rounds):
            lines.append(Text(f"  {seen.run.label}  {line(jumped[-1], seen.run.path)}", style="yellow"))
        if seen.gone:
            lines.append(Text(f"  {seen.run.label}  continue it: fedprior resume {seen.run.path}", style="red"))
    return Group(*lines)


def _course(run: Run) -> list[RenderableType]:
    """How its accuracy has developed, or its loss."""
    accuracy = list(run.series("global_accuracy").values())
    loss = list(run.series("global_loss").values()) if not accuracy else []
    if len(accuracy) > 1:
        ends = f"{100 * accuracy[0]:.1f}% … {100 * accuracy[-1]:.1f}%"
        return [Text(f"  {run.label}  accuracy {sparkline(accuracy)}  {ends}")]
    if len(loss) > 1:
        return [Text(f"  {run.label}  held-out loss {sparkline(loss)}  {loss[0]:.4g} … {loss[-1]:.4g}")]
    return []


def _add_row(table: Table, run: Run, *, gone: bool) -> None:
    done, seconds = len(run.rounds), round_seconds(run.path)
    recent = [seconds[r] for r in sorted(seconds)[-20:]]
    pace = sum(recent) / len(recent) if recent else None
    loss = run.series("train_loss")
    table.add_row(
        run.label,
        f"{done}/{run.planned}",
        ProgressBar(total=run.planned, completed=done, width=16),
        *(_percent(run.final(name)) for name in ("global_accuracy", "local_accuracy", "sparsity")),
        f"{loss[max(loss)]:.3f}" if loss else "–",
        f"{1024**3 / 1e6 * run.gib[-1]:,.1f}" if done else "–",
        f"{pace:.2f}" if pace is not None else "–",
        "stopped: its process is gone" if gone else _state(run, pace),
    )


def _state(run: Run, pace: float | None) -> str:
    if run.finished:
        return "finished"
    if run.trouble:
        return "stopped: " + run.trouble.splitlines()[0]
    rounds = run.path / "rounds.jsonl"
    quiet = time.time() - rounds.stat().st_mtime if rounds.exists() else 0.0
    if quiet > max(STALE, 5 * (pace or 0)):
        return f"no record for {timedelta(seconds=int(quiet))}"
    if pace is None:
        return "starting"
    return f"{timedelta(seconds=round(pace * (run.planned - len(run.rounds))))} left"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Numbers as a line of blocks, the lowest ▁ and the highest █.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    step = max(1, -(-len(values) // width))
    shown = [*values[:-1:step], values[-1]]
    low, high = min(shown), max(shown)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0
    return "".join(BLOCKS[round((v - low) * scale)] for v in shown)


def _percent(value: float) -> str:
    return "–" if value != value else f"{100 * value:.1f}%"
