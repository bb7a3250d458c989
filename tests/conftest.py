"""A network and clients small enough to train in milliseconds, and large enough to be pruned.

And what makes a test's outcome its own, not the machine's: one thread unless `OMP_NUM_THREADS` asks for more, and
properties without a clock. `scripts/test_everywhere.py` runs the suite in the ways in which machines differ.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn

import fedprior
import own_prior
from small_world import CLASSES, small_clients, small_net

# Two workers on two cores need no more; another number is tried where somebody asks for it.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# Where there is no GPU to compile them for, kernels are interpreted. Triton looks when a kernel is defined, so this
# comes before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("FEDPRIOR_TEST_ONEDNN") == "0":  # as in a torch built without it; here, not in subprocesses
    torch.backends.mkldnn.set_flags(_enabled=False)

# A busy machine is slow, and that is no defect. Examples follow from the test's text alone: what passes here passes
# elsewhere, and what fails elsewhere fails here.
hypothesis.settings.register_profile(
    "anywhere",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("anywhere")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def with_own_prior(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prior that is not in the library has a name in the tests that ask for it."""
    for name, entry in own_prior.ENTRIES.items():
        if name in request.node.name:
            monkeypatch.setitem(fedprior.ALGORITHMS, name, entry)


@pytest.fixture
def plain_arithmetic() -> Iterator[None]:
    """For a run that is compared, to the last bit, with one of another process: one thread, oneDNN as it comes."""
    threads, (onednn, *_) = torch.get_num_threads(), torch.backends.mkldnn.set_flags(_enabled=True)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(_enabled=onednn)


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
    """Builds a task of three clients, of which client 1 has an infinite loss from the start, which ends the run."""

    def infinite_for_the_last_class(outputs: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(outputs, y, reduction="none")
        return losses * torch.where(y == CLASSES - 1, torch.inf, 1.0)

    def build(**defaults: Any) -> fedprior.Task:
        task = small_task((4, 4, 4), loss=infinite_for_the_last_class, **{"bound": 0.0, **defaults})
        task.data.y.clamp_(max=CLASSES - 2)
        task.data.y[task.data.train[1]] = CLASSES - 1
        return task

    return build
