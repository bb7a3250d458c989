"""A whole run: rounds, records, checkpoints, summary."""

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedprior.data import FederatedData
from fedprior.data.images import Scale
from fedprior.em import Algorithm, Statistics
from fedprior.errors import DivergedError, SettingError
from fedprior.files import write_atomically
from fedprior.models import check_statistics, check_trainable
from fedprior.network import Network
from fedprior.schedules import Rates
from fedprior.simulate import checkpoint, early, ranks
from fedprior.simulate.arithmetic import KINDS
from fedprior.simulate.attack import ATTACKS
from fedprior.simulate.batches import Schedule
from fedprior.simulate.engine import MODES, Engine, engine, mode_of
from fedprior.simulate.folder import Record, RunFolder, checksum
from fedprior.simulate.round import Simulation, simulation
from fedprior.simulate.server import final_model, learned, totals, with_values
from fedprior.storage import from_bytes, reading, to_bytes
from fedprior.version import __version__
from fedprior.weighting import KINDS as WEIGHTINGS
from fedprior.weighting import check_takes_weight
from fedprior.wire import Wire

Progress = Callable[[Record], object]
"""Called after every round with its record; the run ends there if it returns STOP."""


@dataclass(frozen=True)
class Settings:
    """How to run, whatever the algorithm."""

    rounds: int = 100
    seed: int = 0
    clients_per_round: int = 10
    batch_size: int = 10
    epochs: int = 1
    local_steps: int | None = None
    """Local steps a round, instead of epochs."""
    evaluate_every: int = 5
    """Evaluate the server every so many rounds, and after the last."""
    checkpoint_every: int | None = None
    """Save a checkpoint every so many rounds; none: about every 20 seconds."""
    mode: str = "auto"
    """Clients `in-turn`, `vectorised`, or `captured`, which is vectorised in a CUDA graph; auto: the fastest here."""
    workers: int | None = None
    """Clients in turn that train side by side on a CPU, a core each; none: as many as torch has threads."""
    device: str = "auto"
    arithmetic: str = "tf32"
    """How a GPU multiplies: `tf32`, on its tensor cores, or `float32`, in full single precision."""
    data: str = "auto"
    """Where examples are kept: on the `device`, or on the `host`, from where each cohort's are copied; auto: on the
    device if they take less than 60% of its free memory."""
    wire: str = "float32"
    """What messages are rounded to: float32 (not at all), float16, bfloat16, int8 or int4; or DOWN/UP, as int8/int4."""
    entropy: bool = True
    """Whether int8 and int4 are written in a code of variable length, where that makes a message shorter."""
    messages: str = "auto"
    """`encode` every message to bytes and back, or only `count` its length; auto: encode when clients train in turn."""
    weighting: str = "examples"
    """What a client counts for in the M-step: its number of `examples`, or all are `equal`, as in the paper."""
    lr_schedule: str = "constant"
    """What becomes of the clients' learning rates from round to round, as `cosine(end=0.01, warmup=10)`; see
    `schedules.py`."""
    server_lr_schedule: str = "constant"
    """The same of those of the server's optimisers."""
    statistics: str = "shared"
    """Of a network with BatchNorm: `shared` travel and are pooled, `local` stay with each client, `batch`: there are
    none but those of the batch at hand."""
    report_statistics: str = "received"
    """Which of them a client reports: those of the model it `received`, of the one it ends with (`final`), or its
    `running` averages."""
    statistics_momentum: float = 1.0
    """How much of a round's statistics the server takes over."""
    patience: int | None = None
    """Stop after so many evaluations without a better one; none: never."""
    keep: str = "last"
    """`best`: keep the model of the best evaluation as well."""
    by: str = "auto"
    """What an evaluation is better by: a field of the records, `-NAME` if less is better; auto: global_accuracy, or
    global_loss where there is none."""
    attack: str = "none"
    """What hostile clients do: sign-flip, scale or constant."""
    attackers: float = 0.0
    """The share of clients that are hostile."""

    def __post_init__(self) -> None:
        for name in ("rounds", "clients_per_round", "batch_size", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.keep not in ("last", "best"):
            raise SettingError(f"keep must be last or best, got {self.keep!r}")
        for name in ("local_steps", "checkpoint_every", "workers", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mode not in ("auto", *MODES):
            raise SettingError(f"mode must be auto, {', '.join(MODES[:-1])} or {MODES[-1]}, got {self.mode!r}")
        if self.arithmetic not in KINDS:
            raise SettingError(f"arithmetic must be {' or '.join(KINDS)}, got {self.arithmetic!r}")
        if self.data not in ("auto", "device", "host"):
            raise SettingError(f"data must be auto, device or host, got {self.data!r}")
        Wire.of(self.wire)
        Rates(self.lr_schedule, self.server_lr_schedule)
        if self.weighting not in WEIGHTINGS:
            raise SettingError(f"weighting must be {' or '.join(WEIGHTINGS)}, got {self.weighting!r}")
        self.norm_statistics()
        if self.messages not in ("auto", "encode", "count"):
            raise SettingError(f"messages must be auto, encode or count, got {self.messages!r}")
        if self.messages == "encode" and self.mode not in ("auto", "in-turn"):
            raise SettingError(
                "messages are encoded only when clients train in turn: leave out messages, or set mode=in-turn"
            )
        if self.attack not in ("none", *ATTACKS):
            raise SettingError(f"attack must be none, {', '.join(ATTACKS)}, got {self.attack!r}")
        if not 0 <= self.attackers < 1:
            raise SettingError(f"attackers must be at least 0 and below 1, got {self.attackers}")
        if self.attack == "none" and self.attackers > 0:
            raise SettingError(f"attackers={self.attackers} need an attack: {', '.join(ATTACKS)}")
        if not -(2**63) <= self.seed < 2**63:
            raise SettingError(f"seed must fit in 64 bits, got {self.seed}")

    @property
    def rates(self) -> Rates:
        """What becomes of the learning rates."""
        return Rates(self.lr_schedule, self.server_lr_schedule, self.rounds)

    def check_schedules(self, algorithm: Algorithm) -> None:
        """Refuse schedules of what has no learning rate."""
        if self.server_lr_schedule != "constant" and algorithm.server is None:
            raise SettingError(
                f"server_lr_schedule={self.server_lr_schedule}: the M-step of {algorithm.name} has no learning rate; "
                "give it a server_optimiser, such as SGD(lr=1.0), which is the mean"
            )
        for text, optimisers in ((self.lr_schedule, algorithm.local), (self.server_lr_schedule, algorithm.server)):
            if text != "constant" and any(optimiser.name == "Rprop" for optimiser in (optimisers or {}).values()):
                raise SettingError(f"Rprop chooses its own steps: no schedule, {text}, can change them")

    def on_wire(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm as these settings say: how precise its messages are, its statistics, how many rounds it has."""
        fitted = algorithm.prior.fit(self.rounds)
        return replace(
            algorithm, prior=fitted, wire=Wire.of(self.wire, self.entropy), statistics=self.norm_statistics()
        )

    def norm_statistics(self) -> Statistics:
        """What becomes of a network's statistics."""
        return Statistics(self.statistics, self.report_statistics, self.statistics_momentum)

    def resolved_device(self) -> torch.device:
        """The device to run on."""
        if self.device == "auto":
            return ranks.gpu() if torch.cuda.is_available() else torch.device("cpu")
        try:
            device = ranks.gpu() if self.device == "cuda" and torch.cuda.is_available() else torch.device(self.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise SettingError(f"device {self.device!r} is not available here") from error
        return device


@dataclass(frozen=True, repr=False)
class Result:
    """What a run leaves: a line a round, a summary, and the server's model."""

    records: list[Record]
    summary: Record
    model: nn.Module
    """The server's network, pruned; where the server has several, their `Ensemble`."""
    simulation: Simulation
    path: Path | None
    scale: Scale | None = None
    """How images became inputs, for a task on images."""
    best: nn.Module | None = None
    """With keep=best, the model of the best evaluation."""

    def __repr__(self) -> str:
        header, *cells = self._shown()
        widths = [max(len(header[i]), len(cells[0][i])) for i in range(len(header))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *cells)
        ]
        where = f", kept in {self.path}" if self.path else ""
        return "\n".join([f"Result: {self._title()}{where}", *lines])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        header, *cells = [
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
            for tag, line in zip(("th", "td"), self._shown(), strict=True)
        ]
        return f"<table><caption>{html.escape(self._title())}</caption><tr>{header}</tr><tr>{cells[0]}</tr></table>"

    def _shown(self) -> list[list[str]]:
        """The header and the row of a table of runs."""
        from fedprior.report.table import columns, more_scores, rows

        return [columns(more_scores([self.summary])), *rows([self.summary])]

    def _title(self) -> str:
        about = self.summary
        return f"{about['algorithm']} on {about['task']}, {about['rounds']} rounds, seed {about['seed']}"


def check_cohort(settings: Settings, clients: int) -> None:
    """Refuse cohorts that are larger than the population, and attackers that are none."""
    if settings.clients_per_round > clients:
        raise SettingError(f"clients_per_round is {settings.clients_per_round}, but there are only {clients} clients")
    if settings.attackers and not round(settings.attackers * clients):
        raise SettingError(f"attackers={settings.attackers} of {clients} clients is nobody: give a larger share")


def _check_unjudged(settings: Settings) -> None:
    """Without test examples no evaluation is better than another."""
    judged = settings.by == "auto" or settings.by.lstrip("-").startswith(("global_", "local_"))
    if judged and (settings.patience or settings.keep == "best"):
        what = "patience" if settings.patience else "keep=best"
        raise SettingError(f"{what} needs test examples, (x, y, test_x, test_y) a client: there are none to judge by")


def build(algorithm: Algorithm, network: Network, data: FederatedData, settings: Settings) -> Simulation:
    """The simulation of a run before its first round."""
    check_trainable(network.module)
    check_statistics(network.module, settings.statistics)
    algorithm.check_network(network.params())
    check_cohort(settings, data.clients)
    settings.check_schedules(algorithm)
    if not len(data.test_y):
        _check_unjudged(settings)
    if settings.weighting == "examples" and len(set(data.train.sizes)) > 1:
        check_takes_weight(algorithm.prior)
    device = settings.resolved_device()
    schedule = Schedule(settings.batch_size, settings.epochs, settings.local_steps)
    built = simulation(
        settings.on_wire(algorithm),
        network,
        data,
        schedule,
        clients_per_round=settings.clients_per_round,
        seed=settings.seed,
        workers=1 if device.type != "cpu" else settings.workers or torch.get_num_threads(),
        encode=settings.messages != "count",
        attack=settings.attack,
        attackers=settings.attackers,
        device=device,
        arithmetic=settings.arithmetic,
        weighting=settings.weighting,
        rates=settings.rates,
        streamed=settings.data == "host" or (settings.data == "auto" and not data.fits(device)),
    )
    mode_of(settings.mode, settings.messages, built)  # refuses what cannot be, before anything is written
    return built


@dataclass
class Job:
    """A run on its way: its state, where it is kept, and what has been recorded so far."""

    simulation: Simulation
    settings: Settings
    about: Mapping[str, Any]
    folder: RunFolder | None = None
    records: list[Record] = field(default_factory=list)
    progress: Progress | None = None
    scale: Scale | None = None
    clock: float = 0.0
    """The simulation's seconds when the last record was made."""
    best: nn.Module | None = None
    """The model of the best evaluation of this session, where it is kept."""
    stopped: str = ""
    """Why there are no more rounds, where it is not that all are done."""

    def note(self, record: Record) -> None:
        """Keep a round's record."""
        self.records.append(record)
        if self.folder:
            self.folder.append(record)
            self.folder.append_time(self.simulation.round, self.simulation.seconds - self.clock)
        self.clock = self.simulation.seconds
        self.look_back()

    def look_back(self) -> None:
        """Keep the model if it is the best so far, and see whether there has been none for long."""
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
        """The best model, which an earlier session may have kept."""
        if self.best is not None or self.folder is None:
            return self.best
        with reading(self.folder.best):
            return with_values(self._model(), from_bytes(self.folder.best.read_bytes()))

    def save(self) -> None:
        """Keep the state; the records must be those that led to it."""
        if self.folder:
            checkpoint.save(self.folder.checkpoint, self.simulation, checksum(self.records))

    def fail(self, error: DivergedError) -> None:
        """Leave beside the records why there will be no more."""
        if self.folder:
            write_atomically(self.folder.diverged, f"{error}\n")

    def finish(self, mode: str) -> Result:
        """The summary and the model."""
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


def drive(jobs: list[Job]) -> list[Result | DivergedError]:
    """Run the rounds that are left of jobs that can train together, and finish each; one that diverges ends early."""
    settings = jobs[0].settings
    mode = mode_of(settings.mode, settings.messages, jobs[0].simulation)
    driver = engine([job.simulation for job in jobs], mode)
    for job in jobs:
        if job.folder and job.simulation.round < settings.rounds and not job.stopped:
            job.folder.reopen()
    ended: dict[int, DivergedError] = {}
    saved = time.monotonic()
    number = jobs[0].simulation.round
    while number < settings.rounds and len(ended) < len(jobs) and not jobs[0].stopped:
        number += 1
        outcomes = driver.step(evaluate=number == settings.rounds or number % settings.evaluate_every == 0)
        running, failed = [place for place in range(len(jobs)) if place not in ended], {}
        for place in running:
            outcome = outcomes[place]
            if isinstance(outcome, DivergedError):
                failed[place] = outcome
            else:
                jobs[place].note(outcome)
        if failed or number == settings.rounds or jobs[0].stopped or _due(settings, number, saved):
            driver.sync()
            for place in running:
                jobs[place].save()
            saved = time.monotonic()
        for place in running:
            job = jobs[place]
            if job.progress and place not in failed and job.progress(job.records[-1]) is early.STOP:
                _stop(driver, [jobs[place] for place in running])
        for place, error in failed.items():
            jobs[place].fail(error)
        ended |= failed
    return [ended.get(place) or job.finish(mode) for place, job in enumerate(jobs)]


def _stop(driver: Engine, jobs: list[Job]) -> None:
    """Let this have been the last round."""
    driver.sync()
    for job in jobs:
        job.stopped = job.stopped or "by its callback"
        job.save()


def _due(settings: Settings, number: int, saved: float) -> bool:
    """Whether it is time for a checkpoint."""
    if settings.checkpoint_every is None:
        return time.monotonic() - saved > 20
    return number % settings.checkpoint_every == 0


def summarise(sim: Simulation, records: list[Record], about: Mapping[str, Any]) -> Record:
    """Totals and final values."""
    if "sparsity" not in records[-1]:  # a run that is resumed with fewer rounds than it has may end on any
        records = [*records[:-1], {**records[-1], **sim.evaluate()}]
    device = sim.root.device
    return {
        **about,
        **totals(sim.algorithm, sim.server, records),
        "seconds": round(sim.seconds, 3),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "version": __version__,
    }
