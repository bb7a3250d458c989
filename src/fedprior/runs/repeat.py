"""The command that trains a run again, made from its config, without settings that have their default everywhere."""

import shlex
from collections.abc import Mapping
from typing import Any

from fedprior.catalogue.algorithms import ALGORITHMS, algorithm_settings
from fedprior.catalogue.tasks import TASKS, is_file, task_options
from fedprior.catalogue.tasks.from_file import CHECKSUM
from fedprior.core.options import as_text, plain
from fedprior.core.settings import RUN_OPTIONS
from fedprior.report import Run

FLAGS = ("seed", "rounds")
ABOUT = ("task", "algorithm", "label")
TUNED = (
    *("batch_size", "evaluate_every", "server_optimiser", "server_threshold_optimiser", "structured"),
    *("strength", "conv_rate", "linear_rate", "output_rate"),
)
"""Tasks have their own defaults for these, which only a built task knows, so they are always written."""


def repeat_command(run: Run) -> str:
    """One command line or, if no command line can express the run, a line of Python.

    That is the case for the user's own task or algorithm, and for a task with a different seed from its run.
    """
    config = run.config
    if (run.task not in TASKS and not is_file(run.task)) or run.algorithm not in ALGORITHMS:
        return f"fedprior.run(your_task, your_algorithm, rounds={run.planned}, seed={run.seed})  # in Python"
    of_run = _changed(config["run"], {name: option.default for name, option in RUN_OPTIONS.items()})
    of_run = {key: value for key, value in of_run.items() if key not in (*FLAGS, *ABOUT)}
    # For a function in a file, write everything: only the file knows the defaults.
    of_task = _changed(config["task"], task_options(run.task, {}) if run.task in TASKS else {})
    of_task.pop(CHECKSUM, None)
    of_algorithm = _changed(config["algorithm"], algorithm_settings(run.algorithm, {}))
    if "seed" in config["task"]:
        return _in_python(run, of_run, of_task, of_algorithm)
    words = ["fedprior", "run", run.task, "--algorithm", run.algorithm, "--seed", str(run.seed), "--rounds"]
    words.append(str(run.planned))
    if (label := config["run"]["label"]) != run.algorithm:
        words += ["--label", label]
    for key, value in {**of_run, **of_task, **of_algorithm}.items():
        words += ["--set", f"{key}={as_text(value)}"]
    return shlex.join(words)


def _in_python(run: Run, of_run: Mapping[str, Any], of_task: Mapping[str, Any], of_algorithm: Mapping[str, Any]) -> str:
    def call(function: str, *first: str, **given: Any) -> str:
        return f"{function}({', '.join([*first, *(f'{key}={value!r}' for key, value in given.items())])})"

    task = call("fedprior.task", repr(run.task), **of_task)
    algorithm = call("fedprior.algorithm", repr(run.algorithm), "task.network", **of_algorithm)
    about = {"rounds": run.planned, "seed": run.seed, "label": run.config["run"]["label"]}
    return f"task = {task}; {call('fedprior.run', 'task', algorithm, **about, **of_run)}  # in Python"


def _changed(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in given.items()
        if key in TUNED or key not in defaults or value != plain(defaults[key])
    }
