"""The kernels run on a GPU where there is one, and in Triton's interpreter on the CPU where there is none."""

import os
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

from fedprior.core import operations
from fedprior.kernels import BatchedKernels, registration
from fedprior.kernels.mode import ROUTES, has_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = (3, 7)
"""The first Triton whose interpreter works with numpy 2.4."""


def missing() -> str | None:
    """Why no kernel can run here; None: it can."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton (Linux on x86-64); without it the kernels are not tested"
    if DEVICE == "cuda":
        return None if has_triton() else "this Triton takes no tuples of tensors: it is older than 3.3"
    if os.environ["TRITON_INTERPRET"] != "1":
        return "no GPU, and TRITON_INTERPRET is not 1: the kernels are not tested"
    found = version("triton")
    if tuple(map(int, found.split(".")[:2])) < INTERPRETER:
        return f"no GPU, and the interpreter of Triton {found} is too old for numpy 2.4: the kernels are not tested"
    return None


@pytest.fixture(autouse=True)
def plain_float32(monkeypatch, request):
    if not getattr(request.module, "NEEDS_TRITON", True):
        return
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Operations are torch's own, whatever ran before, until a test registers the kernels; and are so again then."""
    for operation in operations.KNOWN:
        monkeypatch.setattr(operation, "fast", None)
        monkeypatch.setattr(operation, "usable", lambda *_: False)


@pytest.fixture
def on_kernels(device, plain, request):
    """The settings of a run on the kernels, which are interpreted where there is no GPU."""
    torchs = getattr(request.module, "CONVOLUTIONS_ARE_TORCHS", False)
    routes = {f: route for f, route in ROUTES.items() if not (torchs and route is BatchedKernels.conv2d)}
    if device == "cpu":
        registration.register_for(lambda x: True, force=True, routes=routes)
    return {"device": device, "mode": "captured" if device == "cuda" else "vectorised", "arithmetic": "float32"}
