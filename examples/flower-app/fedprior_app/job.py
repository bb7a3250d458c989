"""What to train, and on which data. This is the file to change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor, nn

from fedprior.core.errors import DataError
from fedprior.flower import Job, client_number, named_job, own_job

CLASSES, CLIENTS = 4, 3


class TwoLayers(nn.Module):
    """Your model: any `nn.Module` will do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * 3 * 3, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv(x)))
        return self.out(torch.relu(self.fc(x.flatten(1))))


def make_job(config: Mapping[str, Any]) -> Job:
    """Make the job. It is the same on the server and on every client: all run this code with this config."""
    if config["task"] != "own":
        return named_job(config)
    torch.manual_seed(0)
    example = torch.zeros(1, 8, 8)
    return own_job(config, TwoLayers(), example, clients=CLIENTS, batch_size=10, rounds=5)


def make_data(job: Job, context: Context) -> tuple[Tensor, ...]:
    """A client's examples `(x, y, test_x, test_y)`, which never leave its machine."""
    if job.data is not None:
        return job.part(client_number(context))
    folder = context.node_config.get("data-dir")
    if folder is None:
        raise DataError("start this node with --node-config 'partition-id=0 data-dir=\"/path/to/its/data\"'")
    parts = ("x", "y", "test_x", "test_y")
    # Load only arrays: a pickle in a data folder would run as code.
    return tuple(torch.from_numpy(np.load(Path(str(folder)) / f"{part}.npy", allow_pickle=False)) for part in parts)
