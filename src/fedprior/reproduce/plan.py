"""Which runs an experiment consists of, and which of them are still to be made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprior.algorithms import algorithm_settings
from fedprior.errors import RunError, SettingError
from fedprior.report.records import Broken, Run, read_run
from fedprior.reproduce.experiments import Experiment
from fedprior.runs import run_settings, sort_settings
from fedprior.settings import HERE_ONLY, plain
from fedprior.tasks import task_options


@dataclass(frozen=True)
class RunSpec:
    """One run as plain data: all that it takes to train it, or to go on with it. Settings not given are the task's."""

    folder: Path
    label: str
    seed: int
    task: str
    algorithm: str
    task_options: Mapping[str, Any]
    algorithm_settings: Mapping[str, Any]
    run_settings: Mapping[str, Any]
    """Rounds, device and so on; the seed is in them."""


def plan(experiment: Experiment, seeds: Sequence[int], out: Path, given: Mapping[str, Any]) -> list[RunSpec]:
    """Every run of the experiment, seed by seed, so that a first whole table is there early.

    `given` are settings as with `--set`; each reaches the methods that know it, over the experiment's own.
    """
    if "seed" in given:
        raise SettingError("an experiment has several seeds; name them with --seeds")
    for_run, for_task, for_algorithms = sort_settings(
        given, experiment.task, [method.algorithm for method in experiment.methods]
    )
    specs = []
    for seed in seeds:
        for method in experiment.methods:
            own = {"rounds": experiment.rounds, **experiment.settings, **method.settings}
            own_run, own_task, own_algorithm = sort_settings(own, experiment.task, [method.algorithm])
            settings = {**own_algorithm[method.algorithm], **for_algorithms[method.algorithm]}
            spec = RunSpec(
                out / method.label / f"seed-{seed}",
                method.label,
                seed,
                experiment.task,
                method.algorithm,
                {**own_task, **for_task},
                settings,
                {**own_run, **for_run, "seed": seed},
            )
            # A value of the wrong type or range is refused before anything is trained.
            task_options(spec.task, spec.task_options)
            run_settings(spec.run_settings)
            algorithm_settings(spec.algorithm, spec.algorithm_settings)
            specs.append(spec)
    return specs


def missing(specs: Iterable[RunSpec]) -> list[RunSpec]:
    """The runs that are not finished. A folder that holds a run with other settings, or no run, is an error."""
    left = []
    for spec in specs:
        run = read_run(spec.folder)
        if isinstance(run, Broken):
            # Only half a config may be there, from a crash in the first moment; RunFolder starts such a run anew.
            if spec.folder.exists() and any(entry.suffix != ".part" for entry in spec.folder.iterdir()):
                raise RunError(
                    f"{spec.folder} cannot be continued: it {run.reason}; delete it, or choose another --out"
                )
            left.append(spec)
            continue
        if differences(spec, run):
            raise RunError(f"{spec.folder} has {differences(spec, run)[0]}; delete it, or choose another --out")
        if not run.finished:
            left.append(spec)
    return left


def differences(spec: RunSpec, run: Run) -> list[str]:
    """Where a run on disk is not what its spec says: ["rounds = 3, not 1000", …].

    Settings of the algorithm that the spec leaves to the task are not compared: only its data could tell them.
    """
    settings = algorithm_settings(spec.algorithm, spec.algorithm_settings)
    options = task_options(spec.task, spec.task_options)
    chosen = vars(run_settings(spec.run_settings))
    expected = {
        "run": {
            **{"task": spec.task, "algorithm": spec.algorithm, "label": spec.label},
            **{key: chosen[key] for key in spec.run_settings},
        },
        "task": {key: value for key, value in options.items() if key in run.config["task"]},
        "algorithm": {key: settings[key] for key in spec.algorithm_settings},
    }
    return [
        f"{key} = {run.config[table].get(key)}, not {plain(value)}"
        for table, values in expected.items()
        for key, value in values.items()
        if key not in HERE_ONLY and run.config[table].get(key) != plain(value)
    ]


def read_seeds(text: str) -> list[int]:
    """`3` is the seeds 0, 1 and 2; `0,1,5` are those.

    >>> read_seeds("3"), read_seeds("0,1,5"), read_seeds("7,")
    ([0, 1, 2], [0, 1, 5], [7])
    """
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise SettingError(f"--seeds takes how many, or different seeds separated by commas, got {text!r}")
    return seeds
