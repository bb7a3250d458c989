"""Jobs on the small task. Without Flower the tests here are skipped, so it is imported only where it is used."""

from typing import Any

import pytest

import fedprior
from fedprior.simulate import Settings


@pytest.fixture
def make_job(small_task):
    """A job on the small task, with any algorithm and settings of a run."""

    from fedprior.flower import Job

    def build(name: str = "fedsparse", settings: dict[str, Any] | None = None, **options: Any) -> Job:
        task = small_task()
        algorithm = fedprior.algorithm(name, task.network, **options)
        chosen = Settings(**{**task.defaults, "rounds": 3, **(settings or {})})
        return Job("small", task.network, algorithm, chosen, task.data.clients, task.data, task.data)

    return build


@pytest.fixture
def quick():
    """Nobody waits in a test."""
    from fedprior.flower import Limits

    return Limits(round_seconds=0.05, start_seconds=0.2, poll_seconds=0.001, wait_for=1000)
