"""Routing a model's own calls to the batched kernels: nothing in the user's `nn.Module` changes."""

import importlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedprior.core.operations import batched
from fedprior.kernels.launch import pair


@lru_cache
def available() -> bool:
    """Whether there is a GPU with TF32 tensor cores and a Triton to compile for it."""
    if torch.version.hip or not torch.cuda.is_available() or not has_triton():
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def has_triton() -> bool:
    """Whether Triton is installed and takes tuples of tensors, as of 3.3: torch 2.6 brings an older one."""
    return find_spec("triton") is not None and hasattr(importlib.import_module("triton.language"), "tuple")


class BatchedKernels(TorchFunctionMode):
    """Sends convolutions, linear layers, group norms and 2×2 pools of a vectorised cohort to the kernels.

    Everything else goes to torch.

    `force` also takes tensors that are not on a GPU, for Triton's interpreter; `routes` names the functions to take
    over, by default all that have a kernel.
    """

    def __init__(self, force: bool = False, routes: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        self.force = force
        self.routes = ROUTES if routes is None else routes
        self.routed = 0
        """How many calls went to a kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        route = self.routes.get(func)
        out = route(self, *args, **kwargs) if route else NotImplemented
        if out is NotImplemented:
            return func(*args, **kwargs)
        self.routed += 1
        return out

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether the kernels can take these tensors."""
        present = [t for t in tensors if t is not None]
        return all(t.dtype == torch.float32 and (t.is_cuda or self.force) and 0 < t.numel() < 2**31 for t in present)

    def conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        """The route of `torch.conv2d`; torch itself does well on weights that all clients share."""
        if groups != 1 or pair(dilation) != (1, 1) or input.dim() != 4 or not batched(weight):
            return NotImplemented
        stride, kernel = pair(stride), (weight.shape[2], weight.shape[3])
        if padding == "same":
            padding = (kernel[0] // 2, kernel[1] // 2) if kernel[0] % 2 and kernel[1] % 2 else None
        padding = pair(0 if padding == "valid" else padding) if padding is not None else None
        if padding is None or not self.takes(input, weight, bias):
            return NotImplemented
        if any(n + 2 * p < k for n, p, k in zip(input.shape[2:], padding, kernel, strict=True)):
            return NotImplemented
        from fedprior.kernels.conv_autograd import conv2d

        return conv2d(input, weight, bias, stride, padding)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """The route of `linear`; torch itself does well on weights that all clients share."""
        if weight.dim() != 2 or not batched(weight) or not self.takes(input, weight, bias):
            return NotImplemented
        from fedprior.kernels.linear import linear

        return linear(input, weight, bias)

    def group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ) -> Any:
        """The route of `group_norm`."""
        from fedprior.kernels.group_norm import fits, group_norm

        if (weight is None) != (bias is None) or not batched(input) or not fits(input, num_groups):
            return NotImplemented
        if not self.takes(input, weight, bias):
            return NotImplemented
        return group_norm(input, num_groups, weight, bias, eps)

    def max_pool2d(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        """The route of `max_pool2d` for 2×2 windows that do not overlap."""
        moved = pair(stride) if stride is not None and stride != [] else (2, 2)
        plain = pair(kernel_size) == moved == (2, 2) and pair(padding) == (0, 0) and pair(dilation) == (1, 1)
        if not plain or ceil_mode or return_indices or not batched(input) or input.dim() not in (3, 4):
            return NotImplemented
        if min(input.shape[-2:]) < 2 or not self.takes(input):
            return NotImplemented
        from fedprior.kernels.max_pool import max_pool2d

        return max_pool2d(input)


ROUTES: dict[Any, Any] = {
    torch.conv2d: BatchedKernels.conv2d,
    F.conv2d: BatchedKernels.conv2d,
    F.linear: BatchedKernels.linear,
    torch.group_norm: BatchedKernels.group_norm,
    F.group_norm: BatchedKernels.group_norm,
    torch.max_pool2d: BatchedKernels.max_pool2d,
    F.max_pool2d: BatchedKernels.max_pool2d,
}
