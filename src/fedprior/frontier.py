"""`fedprior frontier`: accuracy against bytes for sparsities × precisions of the wire, beside other algorithms.

Every combination is FedSparse asked for a sparsity with a precision of its messages; runs that differ only in their
sparsity or seed train together on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedprior import runs, sweeps
from fedprior.algorithms import ALGORITHMS
from fedprior.errors import SettingError
from fedprior.report.pareto import Reference
from fedprior.report.records import Run, find_runs, read_run
from fedprior.reproduce import EXPERIMENTS
from fedprior.settings import nearest
from fedprior.wire.precision import Wire

SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95)
WIRES = ("float32", "int8/int4", "int4")
BASELINES = ("fedavg", "feddrop", "fedl1")


def plan(
    task: str,
    sparsities: Sequence[float],
    wires: Sequence[str],
    baselines: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, str],
    out: Path,
    options: Mapping[str, Any],
) -> list[sweeps.Spec]:
    """One spec for each combination and seed, and one a baseline and seed in full precision.

    `settings` are as with `--set`; those of an algorithm reach the ones that know them.
    """
    _check(sparsities, wires, baselines, settings)
    for_run, for_task, for_algorithms = runs.sort_settings(settings, task, ["fedsparse", *baselines])
    common = sweeps.Spec(task, "fedsparse", out, run={**options, **for_run}, task_options=for_task)
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
                own = {**for_algorithms["fedsparse"], "sparsity": sparsity}
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


def train(specs: Sequence[sweeps.Spec], watch: sweeps.Watch | None = None) -> list[tuple[sweeps.Spec, sweeps.Outcome]]:
    """Make the runs that are missing, and say what became of them; a run that diverges has no point."""
    left = sweeps.unfinished(specs)
    return list(zip(left, sweeps.train(left, watch), strict=True))


def read(specs: Sequence[sweeps.Spec], beside: Path | None = None) -> list[Run]:
    """The runs that are finished: those of the specs, then those with other labels in the folder `beside`."""
    found = [read_run(spec.out) for spec in specs]
    own = {spec.label for spec in specs}
    found += [run for run in _others(beside, specs[0].task) if run.label not in own] if beside else []
    return [run for run in found if isinstance(run, Run) and run.finished]


def _others(folder: Path, task: str) -> list[Run]:
    """The runs of a task in a folder of them."""
    of_task = [run for run in find_runs(folder).runs if run.task == task]
    if not of_task:
        raise SettingError(f"{folder} holds no run of {task}")
    return of_task


def published(task: str, rounds: int) -> list[Reference]:
    """The paper's points for a task, where it has an experiment of so many rounds; each once."""
    found: dict[tuple[float | None, ...], Reference] = {}
    for experiment in EXPERIMENTS.values():
        if (experiment.task, experiment.rounds) != (task, rounds):
            continue
        for method in experiment.methods:
            row = method.paper
            if row.gib:
                accuracies = [cell.mean if cell else None for cell in (row.global_accuracy, row.local_accuracy)]
                found.setdefault((row.gib.mean, *accuracies), Reference(method.name, row.gib.mean, *accuracies))
    return list(found.values())
