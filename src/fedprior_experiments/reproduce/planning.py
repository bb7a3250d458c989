"""Which runs an experiment consists of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedprior.core.errors import SettingError
from fedprior.runs.asked import sort_settings
from fedprior.runs.specs import Spec
from fedprior_experiments.reproduce.experiments import Experiment

MOST_SEEDS = 1000
"""Nobody wants more seeds than this: a larger number is probably meant as one seed."""


def plan(experiment: Experiment, seeds: Sequence[int], out: Path, given: Mapping[str, Any]) -> list[Spec]:
    """Return every run of the experiment, seed by seed, so that a first complete table is ready early.

    `given` are settings as with `--set`. Each applies to the methods that know it and overrides the experiment's own.
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
            spec = Spec(
                task=experiment.task,
                algorithm=method.algorithm,
                out=out / method.label / f"seed-{seed}",
                seed=seed,
                label=method.label,
                run={**own_run, **for_run},
                task_options={**own_task, **for_task},
                algorithm_settings=settings,
            )
            spec.config()  # refuses a value of the wrong type or range before anything is trained
            specs.append(spec)
    return specs


def check_names(experiment: Experiment, given: Mapping[str, Any]) -> None:
    """Refuse to change settings that define a method: the table would show something else under the method's name."""
    for method in experiment.methods:
        for key in given.keys() & method.settings.keys():
            raise SettingError(
                f"{key}={method.settings[key]} is what makes {method.label}; leave {method.label} out (--methods), or "
                f"make a run of your own: fedprior run {experiment.task} --algorithm {method.algorithm} "
                f"--set {key}={given[key]}"
            )


def read_seeds(text: str) -> list[int]:
    """Read seeds: `3` means the seeds 0, 1 and 2; `0,1,5` means exactly those.

    >>> read_seeds("3"), read_seeds("0,1,5"), read_seeds("7,")
    ([0, 1, 2], [0, 1, 5], [7])
    """
    if text.strip().isdigit() and int(text) > MOST_SEEDS:
        raise SettingError(f"--seeds {text} would be {int(text):,} seeds; for that one seed write --seeds {text},")
    try:
        seeds = [int(part) for part in text.split(",") if part.strip()] if "," in text else list(range(int(text)))
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise SettingError(f"--seeds takes how many, or different seeds separated by commas, got {text!r}")
    return seeds
