"""Operations and their faster implementations: who is called, and that a CPU never hears of the kernels."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedprior.core import keys, operations
from fedprior.engines import devices
from fedprior.kernels import registration


@pytest.fixture
def unregistered(monkeypatch):
    """What a test registers is gone afterwards."""
    for operation in operations.KNOWN:
        monkeypatch.setattr(operation, "fast", None)
        monkeypatch.setattr(operation, "usable", lambda *_: False)


def test_the_faster_implementation_is_called_only_for_arguments_it_takes(unregistered):
    asked = []

    def usable(*args, **kwargs):
        asked.append((args, kwargs))
        return "dtype" in kwargs

    keys.uniform.register(lambda *args, **kwargs: "fast", usable)
    key = keys.key(0)
    assert keys.uniform(key, (3,), dtype=torch.float32) == "fast"
    assert torch.equal(keys.uniform(key, (3,)), keys.uniform.plain(key, (3,)))
    assert asked == [((key, (3,)), {"dtype": torch.float32}), ((key, (3,)), {})]


def test_an_operation_is_pickled_by_its_name():
    """A copy of its own would never hear of what is registered later."""
    assert copy.deepcopy(keys.fold) is keys.fold
    assert copy.deepcopy([keys.uniform])[0] is keys.uniform
    assert pickle.loads(pickle.dumps(keys.uniform)) is keys.uniform


def test_a_gpu_has_a_kernel_for_every_operation(unregistered, monkeypatch):
    monkeypatch.setattr(registration, "available", lambda: True)
    monkeypatch.setattr(registration, "TRITON", ())
    devices.prepare(torch.device("cpu"))
    assert all(operation.fast is None for operation in operations.KNOWN)
    devices.prepare(torch.device("cuda", 0))
    assert len(operations.KNOWN) >= 11
    assert [operation.__name__ for operation in operations.KNOWN if operation.fast is None] == []


def test_an_unsuitable_gpu_keeps_torchs_own_operations(unregistered, monkeypatch):
    monkeypatch.setattr(registration, "available", lambda: False)
    devices.prepare(torch.device("cuda"))
    assert all(operation.fast is None for operation in operations.KNOWN)


def test_all_triton_code_is_imported_before_the_first_round():
    """Not when a graph is being captured."""
    files = {path.name for path in Path(registration.__file__).parent.glob("*_kernels.py")}
    assert files == {f"{name}_kernels.py" for name in registration.TRITON}


def test_a_run_on_a_cpu_imports_no_kernels():
    program = (
        "import sys, fedprior\n"
        "fedprior.run('mnist-mini', 'fedsparse', rounds=1, clients_per_round=2, device='cpu', mode='vectorised')\n"
        "print(sorted(name for name in sys.modules if name.startswith('fedprior.kernels')))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
