"""Which kernels a run launches: the code around them asks for them where it should."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import fedprior
import fedprior.kernels
from small_world import CLASSES, small_clients


def kernels():
    """Every kernel by module and name, as Triton has it."""
    for path in sorted(Path(fedprior.kernels.__file__).parent.glob("*_kernels.py")):
        module = importlib.import_module(f"fedprior.kernels.{path.stem}")
        for name, value in vars(module).items():
            if name.endswith("_kernel") and hasattr(value, "run"):
                yield f"{path.stem}.{name}", value


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel is launched from here on."""
    counts = Counter()

    def counting(name, run):
        def launch(*args, **kwargs):
            counts[name] += 1
            return run(*args, **kwargs)

        return launch

    for name, kernel in kernels():
        monkeypatch.setattr(kernel, "run", counting(name, kernel.run))
    return counts


def model():
    """A layer of each kind that has a kernel."""
    first = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)]
    second = [nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()]
    last = [nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*first, *second, *last)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # Triton's interpreter is numpy, which warns of it
def test_a_round_launches_every_kernel(on_kernels, launches):
    torch.manual_seed(0)
    task = fedprior.own_task(model(), small_clients((3, 4), (2, 2)), batch_size=4, rounds=1, clients_per_round=2)
    fedprior.run(task, "fedsparse", **on_kernels)
    assert set(launches) == {name for name, _ in kernels()}
    # Three layers and one step: one launch for all gates or one per layer, whatever the number of clients.
    assert launches["gate_kernels.scale_backward_kernel"] == 1
    assert launches["conv_kernels.weight_kernel"] == 3
    assert launches["conv_kernels.bias_kernel"] == 1
    assert launches["norm_kernels.norm_backward_kernel"] == 1


def test_a_cpu_launches_none(small_task, launches):
    fedprior.run(small_task(), "fedsparse", rounds=1, mode="vectorised")
    assert not launches
