"""What the tracer knows about torch's operations: which ones keep a silent channel silent and in its place."""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (nn.GroupNorm, nn.LayerNorm, *INSTANCE_NORMS, *BATCH_NORMS)
# Operations that map a channel of zeros to a channel of zeros, and leave the channels where they are.
ZERO_PRESERVING_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Hardswish, nn.Hardtanh, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
ZERO_PRESERVING_NAMES = (
    *("relu", "relu_", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh"),
    *("hardswish", "hardtanh", "softsign", "dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
)

ALIASES: dict[Callable[..., Any], str] = {operator.add: "add", operator.iadd: "iadd", torch.add: "add"}
ALIASES |= {getattr(F, name): name for name in ZERO_PRESERVING_NAMES if hasattr(F, name)}
ALIASES |= {getattr(torch, name): name for name in ZERO_PRESERVING_NAMES if hasattr(torch, name)}


def name_of(target: Any) -> str:
    """A function's plain name. Dispatchers such as max_pool2d hide theirs, so we look those up."""
    return ALIASES.get(target) or str(getattr(target, "__name__", target))


def pooled(name: str) -> int:
    """How many trailing dimensions an operation pools: 2 for `MaxPool2d` and `max_pool2d`, 0 if it does not pool."""
    return int(name[-2]) if "pool" in name.lower() else 0


def keeps_zero(operation: nn.Hardtanh | fx.Node) -> bool:
    """Whether an operation's bounds, if any, let a zero through."""
    if isinstance(operation, nn.Hardtanh):
        return operation.min_val <= 0 <= operation.max_val
    low, high = operation.kwargs.get("min_val", 0), operation.kwargs.get("max_val", 0)
    return isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= 0 <= high
