"""The command that trains a run again, from its config: what is a default everywhere is left out."""

import shlex
from collections.abc import Mapping
from typing import Any

from fedprior.algorithms import ALGORITHMS, algorithm_settings
from fedprior.report import Run
from fedprior.runs import RUN_OPTIONS
from fedprior.settings import plain
from fedprior.tasks import TASKS, task_options

FLAGS = ("seed", "rounds")
ABOUT = ("task", "algorithm", "label")
TUNED = (
    *("batch_size", "evaluate_every", "server_optimiser", "server_threshold_optimiser", "structured"),
    *("strength", "conv_rate", "linear_rate", "output_rate"),
)
"""Tasks have defaults of their own for these, which only a built task knows: they are always said."""


def repeat_command(run: Run) -> str:
    """One command line; for a task or algorithm of the user's own, which no command line knows, a line of Python."""
    config = run.config
    if run.task not in TASKS or run.algorithm not in ALGORITHMS:
        return f"fedprior.run(your_task, your_algorithm, rounds={run.planned}, seed={run.seed})  # in Python"
    if "seed" in config["task"]:  # a command line knows one seed for both
        task = f"fedprior.task({run.task!r}, {', '.join(f'{key}={value!r}' for key, value in config['task'].items())})"
        return f"fedprior.run({task}, your_algorithm, rounds={run.planned}, seed={run.seed})  # in Python"
    settings = {
        **_changed(config["run"], {name: option.default for name, option in RUN_OPTIONS.items()}),
        **_changed(config["task"], task_options(run.task, {})),
        **_changed(config["algorithm"], algorithm_settings(run.algorithm, {})),
    }
    words = ["fedprior", "run", run.task, "--algorithm", run.algorithm, "--seed", str(run.seed), "--rounds"]
    words.append(str(run.planned))
    if run.label != run.algorithm:
        words += ["--label", run.label]
    for key, value in settings.items():
        if key not in (*FLAGS, *ABOUT):
            words += ["--set", f"{key}={_text(value)}"]
    return shlex.join(words)


def _changed(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in given.items()
        if key in TUNED or key not in defaults or value != plain(defaults[key])
    }


def _text(value: Any) -> str:
    """As `--set` reads it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
