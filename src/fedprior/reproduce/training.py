"""Make the runs that are missing. The one place that trains."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fedprior import runs
from fedprior.algorithms import algorithm
from fedprior.errors import DivergedError
from fedprior.progress import RunProgress
from fedprior.reproduce.plan import RunSpec
from fedprior.simulate import RunFolder
from fedprior.tasks import Task, task


def train(specs: Sequence[RunSpec], console: Console) -> None:
    """Afterwards every spec's folder holds a finished run or, beside its records, a diverged.txt with the reason.

    Half-finished runs go on from their checkpoints. A run that diverges does not stop the others.
    """
    built: tuple[object, Task] | None = None
    for number, spec in enumerate(specs, 1):
        # Runs of one seed share their task: the data is divided once.
        same = (spec.task, spec.seed, sorted(spec.task_options.items()))
        if built is None or built[0] != same:
            built = same, task(spec.task, seed=spec.seed, **spec.task_options)
        name = f"{spec.label}, seed {spec.seed} ({number} of {len(specs)})"
        diverged = spec.folder / "diverged.txt"
        try:
            last = _train(spec, built[1], console, name)
        except DivergedError as error:
            diverged.write_text(f"{error}\n", encoding="utf-8")
            console.print(f"{name}: {error}; going on with the others", highlight=False, markup=False, soft_wrap=True)
            continue
        diverged.unlink(missing_ok=True)
        accuracies = ", ".join(f"{kind} {100 * last[f'{kind}_accuracy']:.1f}%" for kind in ("global", "local"))
        console.print(f"{name}: {accuracies}, {last['seconds']:,.0f} s", highlight=False, markup=False, soft_wrap=True)


def _train(spec: RunSpec, task: Task, console: Console, name: str) -> Mapping[str, Any]:
    """Its summary; the rest is on disk, and must not fill a GPU while the next one trains."""
    settings = {**task.algorithms.get(spec.algorithm, {}), **spec.algorithm_settings}
    rounds = runs.run_settings({**task.defaults, **spec.run_settings}, task).rounds
    with RunProgress(console, name, rounds) as progress:
        if (spec.folder / "config.toml").exists():
            progress.catch_up(RunFolder(spec.folder).records())
            return runs.resume(spec.folder, task=task, progress=progress).summary
        chosen = algorithm(spec.algorithm, task.network, **settings)
        return runs.run(task, chosen, out=spec.folder, label=spec.label, progress=progress, **spec.run_settings).summary
