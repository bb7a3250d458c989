"""`fedprior frontier`: accuracy against bytes for sparsities × precisions of the wire, beside other algorithms.

Each combination is a FedNarrow run with one target sparsity and one precision of its messages. Runs that differ only
in their sparsity or seed train together on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedprior.catalogue.algorithms import ALGORITHMS
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


def plan(
    task: str,
    sparsities: Sequence[float],
    wires: Sequence[str],
    baselines: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, str],
    out: Path,
    options: Mapping[str, Any],
) -> list[Spec]:
    """Return one spec per combination and seed, and one per baseline and seed in full precision.

    `settings` are as with `--set`; an algorithm's setting applies to the algorithms that know it.
    """
    _check(sparsities, wires, baselines, settings)
    for_run, for_task, for_algorithms = asked.sort_settings(settings, task, ["fednarrow", *baselines])
    common = Spec(task, "fednarrow", out, run={**options, **for_run}, task_options=for_task)
    specs = []
    for seed in seeds:
        for name in baselines:
            folder = out / name / f"seed-{seed}"
            own = for_algorithms[name]
            specs.append(replace(common, algorithm=name, out=folder, seed=seed, label=name, algorithm_settings=own))
        for precision in wires:
            for sparsity in sparsities:
                label = f"{100 * sparsity:g}% sparse, {precision}"
                folder = out / f"{precision.replace('/', '_')}-{sparsity:g}" / f"seed-{seed}"
                own = {**for_algorithms["fednarrow"], "sparsity": sparsity}
                run = {**common.run, "wire": precision}
                specs.append(replace(common, out=folder, seed=seed, label=label, run=run, algorithm_settings=own))
    return specs


def _check(
    sparsities: Sequence[float], wires: Sequence[str], baselines: Sequence[str], settings: Mapping[str, str]
) -> None:
    for precision in wires:
        Wire.of(precision)
    for sparsity in sparsities:
        if not 0 <= sparsity < 1:
            raise SettingError(f"a sparsity must be at least 0 and below 1, got {sparsity}")
    for name in baselines:
        if name not in ALGORITHMS:
            raise nearest(name, ALGORITHMS, "algorithm")
    for name in ("sparsity", "max_parameters", "wire", "seed"):
        if name in settings:
            raise SettingError(f"{name} is what a frontier is drawn over: give it with its own option, not with --set")
    if not (sparsities and wires) and not baselines:
        raise SettingError("there is nothing to draw: name sparsities and wires, or baselines")
    for given in (sparsities, wires, baselines):
        if len(set(given)) < len(given):
            raise SettingError(f"{', '.join(map(str, given))} names something twice")


def read(specs: Sequence[Spec], others: Sequence[Run] = ()) -> list[Run]:
    """Return the finished runs of the specs, then those of the others whose labels are not among the specs."""
    found = [read_run(spec.out) for spec in specs]
    own = {spec.label for spec in specs}
    found += [run for run in others if run.label not in own]
    return [run for run in found if isinstance(run, Run) and run.finished]


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
            # Keep only the level of "FedSparse, low": a figure has little room.
            row, name = method.paper, method.name.split(", ")[-1]
            if row.gib:
                accuracies = [cell.mean if cell else None for cell in (row.global_accuracy, row.local_accuracy)]
                found.setdefault((row.gib.mean, *accuracies), Reference(name, row.gib.mean, *accuracies))
    return list(found.values())
