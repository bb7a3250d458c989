"""A network and clients small enough to train in milliseconds, and large enough to be pruned."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprior
from small_world import CLASSES, small_clients, small_net

torch.set_num_threads(1)


@pytest.fixture
def small_task() -> Callable[..., fedprior.Task]:
    """Builds a task of clients of unequal sizes; every call gives a fresh one with the same numbers."""

    def build(
        sizes: Sequence[int] = (5, 11, 2, 8, 9, 3),
        *,
        test_sizes: Sequence[int] | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
        **defaults: Any,
    ) -> fedprior.Task:
        settings = {"rounds": 5, "clients_per_round": 3, "batch_size": 4, "evaluate_every": 2, "device": "cpu"}
        clients = small_clients(sizes, test_sizes, dtype=dtype)
        return fedprior.own_task(small_net(dropout=dropout, dtype=dtype), clients, **{**settings, **defaults})

    return build


@pytest.fixture
def diverging_task(small_task: Callable[..., fedprior.Task]) -> Callable[..., fedprior.Task]:
    """Builds a task of three clients, of which client 1 has an infinite loss from the start."""

    def infinite_for_the_last_class(outputs: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, y, reduction="none")
        return losses * torch.where(y == CLASSES - 1, torch.inf, 1.0)

    def build(**defaults: Any) -> fedprior.Task:
        task = small_task((4, 4, 4), loss=infinite_for_the_last_class, **defaults)
        task.data.y.clamp_(max=CLASSES - 2)
        task.data.y[task.data.train[1]] = CLASSES - 1
        return task

    return build
