"""pfl-research as in its own CIFAR10 benchmark: all data on the device, no callbacks, no evaluation."""

import importlib.util
import multiprocessing
import sys
from unittest.mock import MagicMock

import torch
from torch import Tensor

from contestants.tasks import LR, Task, loss
from contestants.turns import Turns

UNUSED = {
    "dp_accounting": ("dp_event", "pld", "pld.privacy_loss_distribution", "rdp", "rdp.rdp_privacy_accountant"),
    "prv_accountant": (),
    "scipy": ("special", "stats", "optimize"),
}
"""What pfl imports for differential privacy and trees. Nothing here calls it, so a GPU machine may lack it."""


def stand_in() -> None:
    """Make empty modules for those in `UNUSED` that are not installed."""
    for package, parts in UNUSED.items():
        if importlib.util.find_spec(package) is None:
            for name in (package, *(f"{package}.{part}" for part in parts)):
                sys.modules[name] = MagicMock()


def play(task: Task, device: str, threads: int, turns: Turns) -> None:
    # pfl sets itself up only in a process of this name.
    multiprocessing.current_process().name = "MainProcess"
    stand_in()
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(threads)
    assert pytorch_ops.get_default_device().type == device, "pfl uses the GPU if there is one"
    x, y, starts = task.data()
    x, y, module = x.to(device), y.to(device), task.module()
    kind = type(module)

    class Model(kind):  # type: ignore[misc, valid-type]
        """pfl asks the module for its loss."""

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.train()
            return loss(self(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
            return {}

    module.__class__ = Model
    module.to(device)
    optimiser = torch.optim.SGD(module.parameters(), lr=1.0)  # the mean of the clients
    model = PyTorchModel(module, torch.optim.SGD, optimiser)

    def dataset(user: int) -> Dataset:
        rows = slice(starts[user], starts[user + 1])
        return Dataset([x[rows], y[rows]], user_id=str(user))

    clients = FederatedDataset(dataset, get_user_sampler("random", list(range(task.clients))))
    backend = SimulatedBackend(training_data=clients, val_data=clients)
    training = NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=task.batch)
    algorithm = FederatedAveraging()
    algorithm._current_central_iteration = 1  # round 0 would evaluate
    for number in turns:
        params = NNAlgorithmParams(number + 1, 10**9, train_cohort_size=task.cohort, val_cohort_size=0)
        algorithm.run(params, backend, model, training, send_metrics_to_platform=False)
