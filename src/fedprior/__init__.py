"""A federated algorithm is a prior over client parameters.

>>> import fedprior
>>> task = fedprior.task("mnist-mini")                                        # doctest: +SKIP
>>> result = fedprior.run(task, "fedsparse", rounds=50, out="runs/mine")      # doctest: +SKIP
>>> result.summary["global_accuracy"], result.model                           # doctest: +SKIP
"""

from fedprior.algorithms import ALGORITHMS, algorithm
from fedprior.data import FederatedData
from fedprior.deploy import evaluate, export
from fedprior.em import Algorithm
from fedprior.errors import DataError, DivergedError, FedpriorError, ModelError, RunError, SettingError, WireError
from fedprior.network import Network
from fedprior.optimisers import Optimiser
from fedprior.priors import Prior
from fedprior.runs import resume, run
from fedprior.simulate import Result
from fedprior.tasks import TASKS, Task, own_task, task
from fedprior.version import __version__

__all__ = [
    "ALGORITHMS",
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
    "WireError",
    "__version__",
    "algorithm",
    "evaluate",
    "export",
    "own_task",
    "resume",
    "run",
    "task",
]
