"""A live line for a run: rounds, time left, accuracy, bytes. Where there is no terminal, a line every few seconds."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 5.0
"""Seconds between two lines in a file or a pipe."""


class RunProgress:
    """A progress bar that is fed with records."""

    def __init__(self, console: Console, label: str, rounds: int) -> None:
        self.bytes: dict[int, int] = {}
        self.also: Callable[[dict[str, Any]], None] | None = None
        """Who else hears of every round."""
        self.opening = ""
        """What to print first, once a round shows that the settings were right."""
        self.scores = ""
        self.console, self.label, self.rounds = console, label, rounds
        self.said = time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),  # a label may contain brackets
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task(label, total=rounds, news="")

    def __enter__(self) -> "RunProgress":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        """Show one more round."""
        if self.opening:
            self.console.print(self.opening, markup=False, highlight=False, soft_wrap=True)
            self.opening = ""
        self.bytes[record["round"]] = record["bytes_up"] + record["bytes_down"]
        if record.get("global_accuracy") is not None:
            self.scores = f"accuracy {100 * record['global_accuracy']:.1f}%  "
        elif record.get("global_loss") is not None:
            self.scores = f"held-out loss {record['global_loss']:.4g}  "
        if record.get("sparsity"):
            self.scores += f"sparsity {100 * record['sparsity']:.0f}%  "
        news = f"{self.scores}loss {record['train_loss']:.3f}  {sum(self.bytes.values()) / 1e6:,.0f} MB"
        self.progress.update(self.task, completed=record["round"], news=news)
        if not self.console.is_terminal and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            self.console.print(f"{self.label}  {record['round']}/{self.rounds}  {news}", markup=False, soft_wrap=True)
        if self.also:
            self.also(record)

    def catch_up(self, records: list[dict[str, Any]]) -> None:
        """Start from the records of an earlier session."""
        for record in records:
            self(record)
