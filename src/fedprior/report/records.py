"""Runs as they lie on disk, one by one and by label, over their seeds. This module knows records, not algorithms.

A folder that cannot be read becomes a `Broken` with a one-line reason, so that one bad run never hides the others.

>>> found = find_runs("runs/cifar10")                    # doctest: +SKIP
>>> for group in group_runs(found.runs):                 # doctest: +SKIP
...     print(group.label, group.final("global_accuracy"))
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedprior.core.late import is_number, late
from fedprior.core.settings import MACHINE
from fedprior.report.client_table import ClientTable, read_clients
from fedprior.report.reading import (
    FILES,
    SECTIONS,
    Partition,
    check_about,
    read_config,
    read_partition,
    read_rounds,
    read_summary,
    read_trouble,
)

GIB = 2**30


@dataclass(frozen=True)
class Broken:
    """A folder that cannot be read as a run, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Run:
    """One run. Without a summary it is unfinished: still going, stopped, or diverged, which `trouble` says."""

    path: Path
    config: Mapping[str, Mapping[str, Any]]
    rounds: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None = None
    partition: Partition | None = None
    trouble: str = ""
    clients: ClientTable | None = None
    name: str = ""
    """A longer label, where the recorded one does not tell this run from others: `names.told_apart`."""

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.config["run"]["task"])

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.config["run"]["algorithm"])

    @property
    def label(self) -> str:
        """The name of this setting of the algorithm."""
        return self.name or str(self.config["run"]["label"])

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return int(self.config["run"]["seed"])

    @property
    def planned(self) -> int:
        """How many rounds the run is to have."""
        return int(self.config["run"]["rounds"])

    @property
    def finished(self) -> bool:
        """Whether the run reached its end."""
        return self.summary is not None

    @cached_property
    def gib(self) -> np.ndarray:
        """GiB sent in both directions up to and including each round, by server and clients."""
        return np.cumsum([r["bytes_up"] + r["bytes_down"] for r in self.rounds]) / GIB

    def series(self, name: str) -> dict[int, float]:
        """A field by round, where it was recorded and is a number: {5: 0.61, 10: 0.64, …}. `gib` has every round."""
        if name == "gib":
            return {int(r["round"]): float(total) for r, total in zip(self.rounds, self.gib, strict=True)}
        return {int(r["round"]): float(r[name]) for r in self.rounds if is_number(r.get(name))}

    def final(self, name: str) -> float:
        """A field at the end, or at the last evaluation of an unfinished run; NaN where there is none. `gib` too."""
        if name == "gib" and self.summary is not None:
            return float(self.summary["bytes_up"] + self.summary["bytes_down"]) / GIB
        if name != "gib" and self.summary is not None and name in self.summary:
            value = self.summary[name]
            return float(value) if is_number(value) else math.nan
        values = self.series(name)
        return values[max(values)] if values else math.nan

    def late(self, name: str) -> float:
        """The mean of a field over the evaluations in the last 5% of the rounds so far; NaN if there are none."""
        return late(self.rounds, name)


@dataclass(frozen=True)
class Found:
    """What lies under a folder."""

    runs: list[Run] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error, NaN where a single run has none."""

    mean: float
    error: float
    count: int


@dataclass(frozen=True)
class Curve:
    """A field over training: mean and standard error over seeds, against rounds or GiB."""

    x: np.ndarray
    mean: np.ndarray
    error: np.ndarray


@dataclass(frozen=True)
class Group:
    """The runs of one label on one task, by seed."""

    task: str
    label: str
    runs: tuple[Run, ...]

    def final(self, name: str) -> Estimate:
        """A field at the end of training, over seeds."""
        return estimate([run.final(name) for run in self.runs])

    def late(self, name: str) -> Estimate:
        """The mean of a field over the last 5% of the rounds, over seeds."""
        return estimate([run.late(name) for run in self.runs])

    def curve(self, name: str, against: str = "round") -> Curve:
        """A field at the rounds that every run has, so that no seed enters or leaves half-way."""
        series = [run.series(name) for run in self.runs]
        rounds = sorted(set.intersection(*map(set, series))) if series else []
        values = [estimate([one[r] for one in series]) for r in rounds]
        x = np.array(rounds, float)
        if against == "gib":
            sent = [run.series("gib") for run in self.runs]
            x = np.array([np.mean([one[r] for one in sent]) for r in rounds])
        return Curve(x, np.array([v.mean for v in values]), np.array([v.error for v in values]))

    @cached_property
    def mixed(self) -> list[str]:
        """Settings other than the seed in which these runs differ: a mean over them would mean little."""
        seen: dict[tuple[str, str], set[str]] = {}
        for run in self.runs:
            for section in SECTIONS:
                for key, value in run.config[section].items():
                    seen.setdefault((section, key), set()).add(repr(value))
            # Given only where it is not the run's.
            seen.setdefault(("task", "seed"), set()).add(repr(run.config["task"].get("seed")))
        differ = {place for place, values in seen.items() if len(values) > 1} - {("run", "seed")}
        return sorted({key for _, key in differ} - MACHINE)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error, s/√n with the unbiased s².

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(mean=2.0, error=0.5773502691896258, count=3)
    """
    known = [v for v in values if math.isfinite(v)]
    mean = float(np.mean(known)) if known else math.nan
    error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan
    return Estimate(mean, error, len(known))


def find_runs(root: Path | str) -> Found:
    """Every run under a folder, by path; a folder with any of a run's files counts as a run."""
    root = Path(root)
    try:
        folders = folders_of_runs(root)
    except OSError as error:
        return Found(broken=[Broken(root, f"cannot be listed: {error.strerror}")])
    read = [read_run(folder) for folder in folders]
    return Found([r for r in read if isinstance(r, Run)], [r for r in read if isinstance(r, Broken)])


def folders_of_runs(root: Path) -> list[Path]:
    """Every folder under this one that has any of a run's files, by path."""
    return sorted({path.parent for name in FILES for path in root.rglob(name)})


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs of the same task and label together, ordered by seed; groups in the order in which they first appear."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task, run.label), []).append(run)
    return [Group(task, label, tuple(sorted(g, key=lambda r: r.seed))) for (task, label), g in groups.items()]


def read_run(path: Path | str) -> Run | Broken:
    """The run in a folder, or why there is none."""
    path = Path(path)
    try:
        config, rounds, summary = read_config(path), read_rounds(path), read_summary(path)
        check_about(config["run"])
        if summary is not None and len(rounds) < summary["rounds"]:
            raise ValueError(f"summary.json says {summary['rounds']} rounds, but rounds.jsonl holds {len(rounds)}")
        trouble = read_trouble(path) if summary is None else ""
        return Run(path, config, rounds, summary, read_partition(path), trouble, read_clients(path))
    except OSError as error:
        return Broken(path, f"cannot be read: {error.strerror}")
    except ValueError as error:  # JSON, TOML and UTF-8 errors are all ValueErrors
        return Broken(path, " ".join(str(error).split()))
