"""`fedprior frontier`: accuracy against bytes, every method with every precision of the wire.

A method is an algorithm with settings. Those that take a size are run with every sparsity, those that send a share of
their entries with every share. Runs that differ only in such a number or in their seed train together on a GPU.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprior.catalogue.tasks import TASKS, task_options
from fedprior.core.errors import SettingError
from fedprior.core.options import nearest, plain
from fedprior.report.pareto import Reference
from fedprior.report.records import Run, find_runs, read_run
from fedprior.runs import asked
from fedprior.runs.specs import Spec
from fedprior.wire.precision import Wire
from fedprior_experiments.reproduce import EXPERIMENTS

OWN = ("partition_seed", "pixels")
"""Task options in which a frontier may differ from the paper's experiment."""


@dataclass(frozen=True)
class Method:
    """What a point on the front is called, and how it is made."""

    algorithm: str
    over: str = ""
    """The setting that moves it along the front: `sparsity`, `top_k`, or none."""
    dropout: bool | None = None
    """Whether a part of what is kept is drawn for each client; None where there is no such thing."""


METHODS = {
    "fedavg": Method("fedavg"),
    "feddrop": Method("feddrop"),
    "fedl1": Method("fedl1"),
    "narrow": Method("fednarrow", "sparsity", dropout=False),
    "narrow+dropout": Method("fednarrow", "sparsity", dropout=True),
    "learned": Method("fedsparse-sized", "sparsity", dropout=False),
    "learned+dropout": Method("fedsparse-sized", "sparsity", dropout=True),
    "topk": Method("fedtopk", "top_k"),
    "fedpm": Method("fedpm"),
}
NO_DROPOUT = {"conv_rate": 0.0, "linear_rate": 0.0}


@dataclass(frozen=True)
class Grid:
    """What a front is drawn over."""

    methods: Sequence[str]
    sparsities: Sequence[float] = ()
    shares: Sequence[float] = ()
    """Of entries, for Top-K."""
    wires: Sequence[str] = ("float32",)
    seeds: Sequence[int] = (0,)
    dropout: Mapping[str, str] = field(default_factory=dict)
    """The rates of the methods with dropout."""

    def check(self) -> None:
        """Refuse what makes no front."""
        for name in self.methods:
            if name not in METHODS:
                raise nearest(name, METHODS, "method")
        for number in (*self.sparsities, *self.shares):
            if not 0 <= number < 1:
                raise SettingError(f"sparsities and shares must be at least 0 and below 1, got {number}")
        if not self.dropout.keys() <= NO_DROPOUT.keys():
            raise SettingError(f"dropout has the rates {' and '.join(NO_DROPOUT)}, got {', '.join(self.dropout)}")
        precisions = [Wire.of(precision) for precision in self.wires]  # int4 and int4/int4 are one
        for given in (self.methods, self.sparsities, self.shares, self.seeds, precisions):
            if len(set(given)) < len(given):
                named = self.wires if given is precisions else given
                raise SettingError(f"{', '.join(map(str, named))} names something twice")
        if not any(self.points(name) for name in self.methods) or not self.wires:
            raise SettingError(
                "there is nothing to draw: name methods and wires, and sparsities for those that need one"
            )

    def points(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """The points of a method: what each is called, and its settings."""
        method = METHODS[name]
        drawn = {} if method.dropout is None else dict(self.dropout) if method.dropout else NO_DROPOUT
        numbers = {"sparsity": self.sparsities, "top_k": self.shares}.get(method.over, ())
        if not method.over:
            return [(name, drawn)]
        return [(f"{name} {100 * number:g}%", {**drawn, method.over: number}) for number in numbers]


def plan(task: str, grid: Grid, settings: Mapping[str, str], out: Path, options: Mapping[str, Any]) -> list[Spec]:
    """Return one spec for each method, number, precision and seed.

    `settings` are as with `--set`; an algorithm's setting applies to the algorithms that know it.
    """
    grid.check()
    for name in ("sparsity", "max_parameters", "top_k", "wire", "seed", *NO_DROPOUT):
        if name in settings:
            raise SettingError(f"{name} is what a frontier is drawn over: give it with its own option, not with --set")
    algorithms = list(dict.fromkeys(METHODS[name].algorithm for name in grid.methods))
    for_run, for_task, for_algorithms = asked.sort_settings(settings, task, algorithms)
    specs = []
    for seed, name, precision in itertools.product(grid.seeds, grid.methods, grid.wires):
        for called, own in grid.points(name):
            label, algorithm = f"{called}, {precision}", METHODS[name].algorithm
            folder = label.replace("%", "").replace("/", "_").replace(", ", "-").replace(" ", "-")
            specs.append(
                Spec(
                    task,
                    algorithm,
                    out / folder / f"seed-{seed}",
                    seed=seed,
                    label=label,
                    run={**options, **for_run, "wire": precision},
                    task_options=for_task,
                    algorithm_settings={**for_algorithms[algorithm], **own},
                )
            )
    return specs


def read(specs: Sequence[Spec], others: Sequence[Run] = ()) -> list[Run]:
    """Return the finished runs of the specs, then those of the others whose labels are not among the specs."""
    found = [read_run(spec.out) for spec in specs]
    own = {spec.label for spec in specs}
    found += [run for run in others if run.label not in own]
    return finished([run for run in found if isinstance(run, Run)])


def kept(specs: Sequence[Spec], held: Sequence[Run], others: Sequence[Run] = ()) -> list[Run]:
    """Return the finished runs of the specs, then the others that a folder holds, then those of other labels."""
    planned = read(specs)
    places, labels = {run.path for run in planned}, {run.label for run in held}
    more = [run for run in held if run.path not in places]
    return finished([*planned, *more, *(run for run in others if run.label not in labels)])


def finished(runs_found: Sequence[Run]) -> list[Run]:
    """Return those that are."""
    return [run for run in runs_found if run.finished]


def beside(folder: Path, task: str) -> list[Run]:
    """Return the runs of a task in a folder of runs."""
    of_task = [run for run in find_runs(folder).runs if run.task == task]
    if not of_task:
        raise SettingError(f"{folder} holds no run of {task}")
    return of_task


def comparable(runs_found: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs with the same rounds and task as the first, and one line for each of the others."""
    first, alike, notes = runs_found[0], [], []
    for run in runs_found:
        here, there = ({**_task(one), "rounds": len(one.rounds)} for one in (first, run))
        apart = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        if apart:
            notes.append(f"{run.path}: {apart[0]} = {there.get(apart[0])}, not {here.get(apart[0])}; left out")
        else:
            alike.append(run)
    return alike, notes


def _task(run: Run) -> dict[str, Any]:
    """Return the options that define a run's task, without the data's location and the initial weights."""
    usual = {key: plain(value) for key, value in task_options(run.task, {}).items()} if run.task in TASKS else {}
    options = {**usual, **run.config["task"]}  # an option newer than the run had its default
    return {key: value for key, value in options.items() if key not in ("data_dir", "init")}


def published(run: Run) -> list[Reference]:
    """Return the paper's points for a run's experiment, each once; none if its rounds or task differ."""
    found: dict[tuple[float | None, ...], Reference] = {}
    for experiment in EXPERIMENTS.values():
        usual = task_options(experiment.task, {}) if experiment.task == run.task else {}
        same = all(_task(run).get(key, plain(value)) == plain(value) for key, value in usual.items() if key not in OWN)
        if experiment.task != run.task or experiment.rounds != len(run.rounds) or not same:
            continue
        for method in experiment.methods:
            row, name = method.paper, method.name
            if row.gib:
                accuracies = [cell.mean if cell else None for cell in (row.global_accuracy, row.local_accuracy)]
                found.setdefault((row.gib.mean, *accuracies), Reference(name, row.gib.mean, *accuracies))
    return list(found.values())
