"""Tasks: a network, clients with data, and how long to train. There are named tasks, and users can make their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedprior.catalogue.tasks.base import Task, own_task
from fedprior.catalogue.tasks.from_file import file_options, file_task, full, is_file, short
from fedprior.catalogue.tasks.named import TASKS
from fedprior.core.options import call, check_effect, nearest, options_of, resolve

__all__ = ["TASKS", "Task", "full", "is_file", "own_task", "recorded_task", "short", "task", "task_options"]


def task_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a named task, or of a function in a file; those not given have their defaults."""
    if is_file(name):
        return file_options(name, given)
    if name not in TASKS:
        raise nearest(name, TASKS, "task")
    return resolve(TASKS[name], given, f"task {name}")


def task(name: str, seed: int = 0, **options: Any) -> Task:
    """A task by name, `task("mnist-mini", seed=1, alpha=0.5)`, or by file and function, `task("file.py:make_task")`."""
    check_effect(options_of(TASKS[name]) if name in TASKS else {}, task_options(name, options))
    return recorded_task(name, seed, options)


def recorded_task(name: str, seed: int, options: Mapping[str, Any]) -> Task:
    """The task as a run recorded it. The run may be older than the refusal of options without effect."""
    if is_file(name):
        made, chosen = file_task(name, seed, options)
        return replace(made, name=full(name), options=chosen, seed=seed)
    chosen = task_options(name, options)
    return replace(call(TASKS[name], seed, options=chosen), options=chosen, seed=seed)
