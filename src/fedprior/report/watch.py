"""A live terminal view of runs in other processes, from the records they leave on disk."""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedprior.report.names import told_apart
from fedprior.report.reading import round_seconds
from fedprior.report.records import Broken, Run, find_runs, read_run

BLOCKS = "▁▂▃▄▅▆▇█"
STALE = 60.0
"""Seconds without a record after which the view says so."""


def watch(path: Path, console: Console, *, once: bool = False, interval: float = 1.0) -> None:
    """Show a run, or every run under a folder, until all are finished; an interrupt ends it quietly."""
    if once:
        console.print(view(path, look(path)))
        return
    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                found = look(path)
                live.update(view(path, found), refresh=True)
                if found and all(isinstance(r, Broken) or r.finished or r.trouble for r in found):
                    return
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def look(path: Path) -> list[Run | Broken]:
    """The run in a folder, or those under it; none where nothing has started yet."""
    if (path / "config.toml").exists():
        return [read_run(path)]
    found = find_runs(path) if path.is_dir() else None
    return [*told_apart(found.runs), *found.broken] if found else []


def view(path: Path, runs: Sequence[Run | Broken]) -> RenderableType:
    """One row per run, and below it the course of its accuracy."""
    if not runs:
        return Text(f"waiting for a run in {path}")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("run", "round", "", "global", "local", "sparsity", "loss", "MB", "s/round", "state"):
        numeric = column not in ("run", "", "state")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    lines: list[RenderableType] = [table]
    for run in runs:
        if isinstance(run, Broken):
            lines.append(Text(f"{run.path}: {run.reason}", style="red"))
            continue
        _add_row(table, run)
        accuracy = list(run.series("global_accuracy").values())
        loss = list(run.series("global_loss").values()) if not accuracy else []
        if len(accuracy) > 1:
            ends = f"{100 * accuracy[0]:.1f}% … {100 * accuracy[-1]:.1f}%"
            lines.append(Text(f"  {run.label}  accuracy {sparkline(accuracy)}  {ends}"))
        elif len(loss) > 1:
            lines.append(Text(f"  {run.label}  held-out loss {sparkline(loss)}  {loss[0]:.4g} … {loss[-1]:.4g}"))
    return Group(*lines)


def _add_row(table: Table, run: Run) -> None:
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
        _state(run, pace),
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
