"""From names to a run: build the task, the algorithm and the settings that names and text ask for, and the config."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from fedprior.catalogue.algorithms import (
    ALGORITHMS,
    SIZES,
    algorithm_settings,
    asked_algorithm,
    check_sized,
    entry,
    run_settings,
)
from fedprior.catalogue.tasks import Task, task_options
from fedprior.catalogue.tasks import task as named_task
from fedprior.core.errors import SettingError, described
from fedprior.core.frozen import fingerprint, frozen_parameters
from fedprior.core.options import as_table, nearest
from fedprior.core.settings import RUN_OPTIONS, Settings
from fedprior.em import Algorithm
from fedprior.engines.build import check_run, check_useful
from fedprior.engines.privacy import with_noise
from fedprior.engines.unseen import held_out
from fedprior.runs.early import check_by
from fedprior.version import __version__

Config: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The tables of a config.toml. The tables `run`, `task` and `algorithm` hold settings."""


class Parts(NamedTuple):
    """The parts of a run."""

    task: Task
    algorithm: Algorithm
    settings: Settings


class Sorted(NamedTuple):
    """Settings of the run, of the task and, by name, of each algorithm."""

    run: dict[str, Any]
    task: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]


def sort_settings(given: Mapping[str, Any], task: str | None, algorithms: Sequence[str]) -> Sorted:
    """Divide `--set` among the run, the task and the algorithms; a name that none of them knows is an error."""
    task_names = {} if task is None else task_options(task, {})
    known = {name: algorithm_settings(name, {}) for name in algorithms}
    everything = {*RUN_OPTIONS, *task_names, *(key for settings in known.values() for key in settings)}
    for key in given:
        if key not in everything:
            if key in SIZES:
                for name in algorithms:
                    check_sized(name)
            owners = [name for name in ALGORITHMS if key in algorithm_settings(name, {})]
            if owners:
                raise SettingError(f"{key} is a setting of {', '.join(owners)}, not of {', '.join(algorithms)}")
            if key == "data_dir":
                raise SettingError(f"{task} has no --data-dir: its data come with the task")
            raise nearest(key, everything, "setting")
    return Sorted(
        {k: v for k, v in given.items() if k in RUN_OPTIONS},
        {k: v for k, v in given.items() if k in task_names},
        {name: {k: v for k, v in given.items() if k in settings} for name, settings in known.items()},
    )


def assemble(
    task: Task | str,
    algorithm: Algorithm | str,
    run: Mapping[str, Any],
    task_settings: Mapping[str, Any] | None = None,
    algorithm_settings: Mapping[str, Any] | None = None,
) -> Parts:
    """Build a run's parts from names, or use those that are built already; settings are text or values.

    Settings that are not given have the task's default, or else the library's. Parts that cannot be trained are
    refused, and so is a setting that would have no effect.
    """
    if isinstance(algorithm, str):
        entry(algorithm)  # an unknown name is refused before a task is built
    else:
        check_kind(algorithm, Algorithm, "algorithm")
    name = algorithm if isinstance(algorithm, str) else algorithm.name
    if isinstance(task, str):
        task = named_task(task, seed=run_settings(run, algorithm=name).seed, **task_settings or {})
    check_kind(task, Task, "task")
    if isinstance(algorithm, str):
        usual = task.algorithms.get(algorithm, {})
        algorithm = asked_algorithm(algorithm, task.network, algorithm_settings or {}, usual)
    seed = {} if task.seed is None else {"seed": task.seed}
    data, settings = task.data, run_settings({**seed, **task.defaults, **run}, task.data.clients, name)
    settings = with_noise(settings, data.clients - held_out(data.clients, settings.unseen))
    check_run(settings, algorithm, task.network, data.clients, uneven=len(set(data.train.sizes)) > 1)
    check_useful(settings, algorithm, task.network, data.clients, tested=len(data.test_y) > 0)
    check_by(settings, algorithm, task.network, data)
    return Parts(task, algorithm, settings)


def check_kind(value: Any, kind: type, what: str) -> None:
    """Refuse anything that is not a task or an algorithm of the right kind."""
    if not isinstance(value, kind):
        raise SettingError(f"the {what} is {described(value)}; give its name, or one made by fedprior.{what}(…)")


def setting_tables(
    task: str,
    algorithm: str,
    label: str,
    *,
    run: Mapping[str, Any],
    task_settings: Mapping[str, Any],
    algorithm_settings: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """The tables of a config that hold settings, with the run's as they are recorded."""
    return {
        "run": {"task": task, "algorithm": algorithm, "label": label, **run},
        "task": as_table(task_settings),
        "algorithm": as_table(algorithm_settings),
    }


def made() -> dict[str, dict[str, Any]]:
    """The table of a config that lists the versions behind a run."""
    return {"made": {"fedprior": __version__, "torch": str(torch.__version__)}}


def frozen_table(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The table of a config about a network's frozen weights, which are in no file of the run; none without them."""
    found = fingerprint(module)
    return {"frozen": {"parameters": frozen_parameters(module), "fingerprint": found}} if found else {}


def config_of(parts: Parts, label: str, partition: str = "") -> dict[str, dict[str, Any]]:
    """The whole content of a run's config.toml."""
    task, algorithm, settings = parts
    # A task may have a different seed from its run: the same clients and initial weights, but other draws.
    other = {} if task.seed in (None, settings.seed) else {"seed": task.seed}
    return {
        **setting_tables(
            task.name,
            algorithm.name,
            label,
            run=settings.recorded(),
            task_settings={**other, **task.options},
            algorithm_settings=algorithm.recorded(),
        ),
        "partition": {"clients": task.data.clients, "fingerprint": partition},
        **frozen_table(task.network.module),
        **made(),
    }
