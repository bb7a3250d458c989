"""Registers the kernels with the operations that they speed up."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior.core import batch_norm as core_batch_norm
from fedprior.core import keys, network
from fedprior.kernels import batch_norm, concrete, draws, gates
from fedprior.kernels.mode import BatchedKernels, available
from fedprior.priors import thresholds
from fedprior.units import rows

TRITON = ("batch", "conv", "draw", "gate", "norm", "pool")
"""The `*_kernels.py` there are: Triton code, which only a machine with Triton can import."""
STRETCH = concrete.Stretch(thresholds.BETA, thresholds.GAMMA, thresholds.ZETA, thresholds.SHIFT)


def register() -> None:
    """Register them for good, if there is a suitable GPU; otherwise nothing changes."""
    if available():
        for name in TRITON:
            importlib.import_module(f"fedprior.kernels.{name}_kernels")
        register_for(lambda x: x.is_cuda)


def register_for(takes: Callable[[Tensor], bool], **routing: Any) -> None:
    """Register them for such tensors. `routing` is for `BatchedKernels`. Tests use a CPU's, which Triton interprets."""

    def single(x: Tensor) -> bool:
        return takes(x) and x.dtype == torch.float32

    keys.mix_in.register(draws.fold, lambda key, data: takes(key))
    keys.bits.register(draws.bits, lambda key, count: takes(key))
    keys.uniform.register(draws.uniform, lambda key, shape, dtype=torch.float32: takes(key) and dtype == torch.float32)
    keys.dropout.register(draws.dropout, lambda x, key, rate: takes(key) and x.dtype == torch.float32)
    rows.row_norms.register(gates.norms, lambda weights: single(weights[0]))
    rows.scale_rows.register(gates.scale, lambda layers, z, tensors: single(z))
    thresholds.logits_and_gates.register(logits_and_gates, lambda norms, v, *_, dense: single(v))
    thresholds.draw_gates.register(draw_gates, lambda logits, key: single(logits))
    core_batch_norm.normalise.register(batch_norm.normalise, lambda x, *given: single(x) and batch_norm.fits(x, *given))
    network.class_losses.register(class_losses, lambda outputs, y: single(outputs) and _are_classes(outputs, y))
    network.routed.register(lambda x: BatchedKernels(**routing), takes)


def logits_and_gates(
    norms: Tensor, v: Tensor, is_open: Tensor | None, temperature: Tensor | float, *, dense: bool
) -> tuple[Tensor, Tensor]:
    """`thresholds.logits_and_gates`."""
    edges = concrete.Edges(thresholds.EDGE if dense else -math.inf, thresholds.OPEN, thresholds.CLOSED)
    return concrete.logits_and_gates(norms, v, is_open, temperature, edges)


def draw_gates(logits: Tensor, key: Tensor) -> Tensor:
    """`thresholds.draw_gates`."""
    return concrete.hard_concrete(logits, key, STRETCH)


def class_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """`network.class_losses`: torch's own takes some ten operations under `vmap`. Labels were checked with the data."""
    return -F.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)


def _are_classes(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.dim() == 2 and targets.dtype == torch.int64
