"""A whole run: rounds, records, checkpoints, summary."""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedprior.catalogue.data.images import Scale
from fedprior.catalogue.data.text import Alphabet
from fedprior.core.errors import DivergedError, FedpriorWarning, counted
from fedprior.core.files import write_atomically
from fedprior.core.settings import Settings
from fedprior.core.storage import from_bytes, reading, to_bytes
from fedprior.engines import ranks
from fedprior.engines.loop.round import Simulation
from fedprior.engines.modes import Engine, engine, mode_of
from fedprior.engines.server_state import (
    STILL,
    Record,
    final_model,
    learned,
    left_out_often,
    stands_still,
    totals,
    with_values,
)
from fedprior.report.jumps import line, seen_now
from fedprior.report.run_tables import table_of_summaries
from fedprior.report.table import Table
from fedprior.runs import checkpoint, early, kept
from fedprior.runs.folder import RunFolder, checksum
from fedprior.version import __version__

LARGE = 2
"""A client with more than so many times the median's examples is a large one."""
Progress = Callable[[Record], object]
"""Called after every round with its record. If it returns STOP, the run ends there."""


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run: one record per round, a summary, and the server's model."""

    records: list[Record]
    summary: Record
    model: nn.Module
    """The server's pruned network; if the server has several, their `Ensemble`."""
    simulation: Simulation
    path: Path | None
    scale: Scale | Alphabet | None = None
    """How images or characters become inputs, for a task with such."""
    best: nn.Module | None = None
    """With keep=best, the model of the best evaluation."""

    def __repr__(self) -> str:
        where = f", kept in {self.path}" if self.path else ""
        table = self._table()
        return f"Result: {table.title}{where}\n{table.text()}"

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        return self._table().html()

    def _table(self) -> Table:
        about = self.summary
        title = f"{about['algorithm']} on {about['task']}, {counted(about['rounds'], 'round')}, seed {about['seed']}"
        return replace(table_of_summaries([about]), title=title)


@dataclass
class Session:
    """A run in progress in this process: its state, its folder, and its records so far."""

    simulation: Simulation
    settings: Settings
    about: Mapping[str, Any]
    folder: RunFolder | None = None
    records: list[Record] = field(default_factory=list)
    progress: Progress | None = None
    scale: Scale | Alphabet | None = None
    clock: float = 0.0
    """The simulation's seconds at the last record."""
    best: nn.Module | None = None
    """The model of this session's best evaluation, if it is kept."""
    stopped: str = ""
    """Why the run ended early, if it did."""
    error: DivergedError | None = None
    """The error that names the round in which it diverged, and the client or server that did."""

    def note(self, record: Record) -> None:
        """Store a round's record."""
        self.records.append(record)
        if self.folder:
            self.folder.append(record)
            if "sparsity" in record:
                self.folder.append_clients(record["round"], self.simulation.clients)
            self.folder.append_time(self.simulation.round, self.simulation.seconds - self.clock)
        self.clock = self.simulation.seconds
        self.look_back()
        if ranks.first():
            self._warn()

    def _warn(self) -> None:
        """Say at once what a user would otherwise find in the records."""
        if jump := seen_now(self.records):
            warnings.warn(line(jump, self.folder.path if self.folder else None), FedpriorWarning, stacklevel=3)
        if stands_still(self.records, self.settings.clients_per_round):
            warnings.warn(
                f"in the last {STILL} rounds every upload was left out, so the server stands still: clients may be too "
                f"unlike one another for bound={self.settings.bound:g}; give a larger one, or 0",
                FedpriorWarning,
                stacklevel=3,
            )
        # A client with many examples takes many steps: it goes far, and is not at fault.
        sizes = self.simulation.data.train.sizes
        for client in left_out_often(self.records):
            own, usual = int(sizes[client]), statistics.median(sizes)
            if own > LARGE * usual:
                warnings.warn(
                    f"client {client} was left out in {STILL} rounds, because it went far from the server, but it "
                    f"has {own:,} training examples where others have {usual:,.0f}, and so takes more steps. If it is "
                    f"honest, give a bound above {self.settings.bound:g}, or 0",
                    FedpriorWarning,
                    stacklevel=3,
                )

    def look_back(self) -> None:
        """Keep the model if it is the best so far, and stop the run if patience has run out."""
        settings = self.settings
        found = early.best(self.records, settings.by) if settings.keep == "best" or settings.patience else None
        if found and settings.keep == "best" and found.round == self.simulation.round:
            self.best = self._model()
            if self.folder:
                write_atomically(self.folder.best, to_bytes(learned(self.best)))
        if found and settings.patience and found.since >= settings.patience:
            self.stopped = f"no better {found.name} in {settings.patience} evaluations"

    def _model(self) -> nn.Module:
        sim = self.simulation
        return final_model(sim.algorithm, sim.server, sim.network.module, sim.measures.class_dim)

    def _best(self) -> nn.Module | None:
        """The best model, which may come from an earlier session."""
        if self.best is not None or self.folder is None:
            return self.best
        with reading(self.folder.best):
            return with_values(self._model(), from_bytes(self.folder.best.read_bytes()))

    def save(self) -> None:
        """Save the state; the records must be those that led to it."""
        if self.folder:
            checkpoint.save(self.folder.checkpoint, self.simulation, checksum(self.records))
            kept.keep(self.folder, self.settings, self.simulation.round, self.records)

    @property
    def ended(self) -> bool:
        """Whether there are no more rounds, because it diverged or was stopped."""
        return bool(self.error or self.stopped)

    def reopen(self) -> None:
        """Forget its earlier end, if there are rounds left."""
        if self.folder and self.simulation.round < self.settings.rounds and not self.stopped:
            self.folder.reopen()

    def hear(self, outcome: Record | DivergedError) -> None:
        """Take the outcome of a round; ignore any after the one in which it diverged."""
        if isinstance(outcome, DivergedError):
            self.error = self.error or outcome
        else:
            self.note(outcome)

    def asks_to_stop(self) -> bool:
        """Report the latest round to the callback; return whether it asks to stop."""
        return not self.error and self.progress is not None and self.progress(self.records[-1]) is early.STOP

    def fail(self) -> None:
        """If it diverged, write down, next to the records, why there will be no more."""
        if self.folder and self.error:
            write_atomically(self.folder.diverged, f"{self.error}\n")

    def finish(self, mode: str) -> Result:
        """Make and store the summary and the model."""
        module = self._model()
        unfinished = self.stopped and self.simulation.round < self.settings.rounds
        about = {**self.about, "mode": mode, **({"stopped": self.stopped} if unfinished else {})}
        found = early.best(self.records, self.settings.by) if self.settings.keep == "best" else None
        best = self._best() if found else None
        if found:
            about |= {"best_round": found.round, f"best_{found.name}": found.value}
        summary = summarise(self.simulation, self.records, about)
        if self.folder:
            self.folder.finish(summary, learned(module))
        path = self.folder.path if self.folder else None
        return Result(self.records, summary, module, self.simulation, path, self.scale, best)


def drive(sessions: list[Session]) -> list[Result | DivergedError]:
    """Run the remaining rounds of sessions that can train together, and finish each; one that diverges ends early."""
    settings = sessions[0].settings
    mode = mode_of(settings.mode, settings.messages, sessions[0].simulation)
    driver = engine([session.simulation for session in sessions], mode)
    for session in sessions:
        session.reopen()
    with ExitStack() as stack:
        for folder in [session.folder for session in sessions if session.folder]:
            stack.enter_context(folder.resumable())
        number, saved = sessions[0].simulation.round, time.monotonic()
        while number < settings.rounds and (running := [session for session in sessions if not session.ended]):
            number += 1
            outcomes = driver.step(evaluate=number == settings.rounds or number % settings.evaluate_every == 0)
            for session, outcome in zip(sessions, outcomes, strict=True):
                session.hear(outcome)
            if number == settings.rounds or any(session.ended for session in running) or _due(settings, number, saved):
                _save(driver, running)
                saved = time.monotonic()
            wishes = [session.asks_to_stop() for session in running]
            if any(wishes):
                for session in running:
                    session.stopped = session.stopped or "by its callback"
                _save(driver, running)
            for session in running:
                session.fail()
        return [session.error or session.finish(mode) for session in sessions]


def _save(driver: Engine, sessions: list[Session]) -> None:
    """Save a checkpoint of each."""
    driver.sync()
    for session in sessions:
        session.save()


def _due(settings: Settings, number: int, saved: float) -> bool:
    """Whether a checkpoint is due."""
    if kept.forced(settings, number):
        return True
    if settings.checkpoint_every is None:
        return time.monotonic() - saved > 20
    return number % settings.checkpoint_every == 0


def summarise(sim: Simulation, records: list[Record], about: Mapping[str, Any]) -> Record:
    """Totals and final values."""
    if "sparsity" not in records[-1]:  # a resumed run whose number of rounds was lowered may end without an evaluation
        records = [*records[:-1], {**records[-1], **sim.evaluate()}]
    device = sim.root.device
    return {
        **about,
        **totals(sim.algorithm, sim.server, records),
        "seconds": round(sim.seconds, 3),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "version": __version__,
    }
