"""How precisely a GPU multiplies: TF32 on its tensor cores, or single precision throughout."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def using(kind: str, device: torch.device) -> Iterator[None]:
    """In this block, convolutions and matrix products on a GPU are of that kind. Nothing changes outside it.

    A CUDA graph keeps the kind it was captured with.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _set("high" if kind == "tf32" else "highest", kind == "tf32")
    try:
        yield
    finally:
        _set(*before)


def _set(products: str, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(products)
    if torch.backends.cudnn.allow_tf32 != convolutions:
        with warnings.catch_warnings():  # newer versions of torch have a new name that older ones do not know
            warnings.simplefilter("ignore")
            torch.backends.cudnn.allow_tf32 = convolutions
