"""Tasks: a network, clients with data, and how long to train. Named ones, and a user's own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedprior.settings import nearest, resolve
from fedprior.tasks.base import Task, own_task
from fedprior.tasks.named import TASKS

__all__ = ["TASKS", "Task", "own_task", "task", "task_options"]


def task_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a named task, those not given at their defaults."""
    if name not in TASKS:
        raise nearest(name, TASKS, "task")
    return resolve(TASKS[name], given, f"task {name}")


def task(name: str, seed: int = 0, **options: Any) -> Task:
    """A named task: `task("mnist-mini", seed=1, alpha=0.5)`."""
    resolved = task_options(name, options)
    return replace(TASKS[name](seed, **resolved), seed=seed)
