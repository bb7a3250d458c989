"""A federated algorithm is a prior over client parameters.

>>> import fedprior
>>> task = fedprior.task("mnist-mini")                                        # doctest: +SKIP
>>> result = fedprior.run(task, "fedsparse", rounds=50, out="runs/mine")      # doctest: +SKIP
>>> result.summary["global_accuracy"], result.model                           # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedprior.core.errors import DataError, DivergedError, FedpriorError, ModelError, RunError, SettingError, WireError
from fedprior.version import __version__

if TYPE_CHECKING:
    from fedprior.catalogue.algorithms import ALGORITHMS, algorithm
    from fedprior.catalogue.data import PARTITIONS, clients_from, divide
    from fedprior.catalogue.tasks import TASKS, Task, own_task, task
    from fedprior.core.adapters import adapt
    from fedprior.core.federated import FederatedData
    from fedprior.core.network import Network, Whole
    from fedprior.core.optimisers import Optimiser
    from fedprior.core.probabilities import METRICS
    from fedprior.em import Algorithm
    from fedprior.priors import Prior
    from fedprior.runs.drive import Result
    from fedprior.runs.early import STOP
    from fedprior.runs.kept import rollback
    from fedprior.runs.start import resume, run
    from fedprior.trained.export import evaluate, export
    from fedprior.trained.posterior import posterior

__all__ = [
    "ALGORITHMS",
    "METRICS",
    "PARTITIONS",
    "STOP",
    "TASKS",
    "Algorithm",
    "DataError",
    "DivergedError",
    "FederatedData",
    "FedpriorError",
    "ModelError",
    "Network",
    "Optimiser",
    "Prior",
    "Result",
    "RunError",
    "SettingError",
    "Task",
    "Whole",
    "WireError",
    "__version__",
    "adapt",
    "algorithm",
    "clients_from",
    "divide",
    "evaluate",
    "export",
    "own_task",
    "posterior",
    "resume",
    "rollback",
    "run",
    "task",
]

_HOMES = {
    "catalogue.algorithms": ("ALGORITHMS", "algorithm"),
    "catalogue.data": ("PARTITIONS", "clients_from", "divide"),
    "catalogue.tasks": ("TASKS", "Task", "own_task", "task"),
    "core.adapters": ("adapt",),
    "core.federated": ("FederatedData",),
    "core.network": ("Network", "Whole"),
    "core.optimisers": ("Optimiser",),
    "core.probabilities": ("METRICS",),
    "em": ("Algorithm",),
    "priors": ("Prior",),
    "runs.drive": ("Result",),
    "runs.early": ("STOP",),
    "runs.kept": ("rollback",),
    "runs.start": ("resume", "run"),
    "trained.export": ("evaluate", "export"),
    "trained.posterior": ("posterior",),
}
"""Which module has which name. They import torch, which takes seconds, so each is imported on first use."""


if not TYPE_CHECKING:  # type checkers should see only what is imported above

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f"fedprior.{home}"), name)
                return value
        try:  # as if all modules had been imported
            return import_module(f"fedprior.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"fedprior.{name}":
                raise
            raise AttributeError(f"module 'fedprior' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
