import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def plain_float32(monkeypatch, request):
    if not getattr(request.module, "NEEDS_TRITON", True):
        return
    pytest.importorskip("triton", reason="the kernels need Triton, which comes with torch for CUDA")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU: TRITON_INTERPRET=1 runs the kernels in Triton's interpreter")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def device():
    return DEVICE
