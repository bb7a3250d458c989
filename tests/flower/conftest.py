"""Jobs on the small task. Without Flower the tests here are skipped, so it is imported only where it is used."""

from typing import Any

import pytest
import torch

import fedprior
from fedprior.core.settings import Settings


@pytest.fixture
def make_job(small_task):
    """A job on the small task, with any algorithm and settings of a run."""

    from fedprior.flower import Job

    def build(
        name: str = "fedsparse",
        settings: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Job:
        task = small_task(dtype=dtype)
        algorithm = fedprior.algorithm(name, task.network, **options)
        chosen = Settings(**{**task.defaults, "rounds": 3, **(settings or {})})
        return Job("small", task.network, algorithm, chosen, task.data.clients, task.data, task.data)

    return build


class Clock:
    """Time that passes only while somebody waits, so that no machine is too slow for a limit."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The strategy's clock."""
    pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")
    clock = Clock()
    monkeypatch.setattr("fedprior.flower.strategy.time", clock)
    return clock


@pytest.fixture
def quick():
    """Limits that are reached after a few looks."""
    from fedprior.flower import Limits

    return Limits(round_seconds=0.05, start_seconds=0.2, poll_seconds=0.001, wait_for=1000)
