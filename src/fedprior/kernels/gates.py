"""Gates on groups of weights: norms, the product with the gates, and both gradients in one pass over the weights.

Tensors carry the clients in front. A layer of `units` gates has a weight with one row per gate and up to two vectors
with one entry per gate (a bias, or a norm's weight and bias). `units/rows.py` does the same in torch's own operations.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprior.kernels.function import Batched
from fedprior.kernels.launch import strided, target
from fedprior.units.rows import MOST, Rows, scale_rows

BLOCK = 1024
Layers = tuple[Rows, ...]


def norms(weights: Sequence[Tensor]) -> Tensor:
    """`rows.row_norms`."""
    found: Tensor = Norms.apply(*(t.detach().unsqueeze(0) for t in weights))
    return found.squeeze(0)


def scale(layers: Layers, gates: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`rows.scale_rows`."""
    out = Scale.apply(layers, gates.unsqueeze(0), *(t.unsqueeze(0) for t in tensors))
    return [t.squeeze(0) for t in out]


class Slot(NamedTuple):
    """What one launch works on: a layer's tensors, and where its gates stand."""

    units: int
    first: int
    total: int
    at: slice

    def options(self, width: int) -> dict[str, Any]:
        """Compile-time sizes."""
        count = self.at.stop - self.at.start
        return {"A": count > 1, "B": count > 2, **_sizes(width)}


def _sizes(width: int) -> dict[str, Any]:
    block = min(BLOCK, max(32, 1 << (width - 1).bit_length()))
    return {"WIDTH": width, "BLOCK": block, "num_warps": 4 if block >= 512 else 1}


def _slots(layers: Layers) -> Iterator[Slot]:
    total, first, start = sum(layer.units for layer in layers), 0, 0
    for layer in layers:
        yield Slot(layer.units, first, total, slice(start, start + layer.tensors))
        first, start = first + layer.units, start + layer.tensors


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A layer's tensors, made three; the first stands in for any that are missing."""
    return [*tensors, *[tensors[0]] * (MOST - len(tensors))]


def _strides(tensors: Sequence[Tensor]) -> list[int]:
    return [t.stride(0) for t in tensors]


def _width(tensor: Tensor) -> int:
    """The number of entries in one row."""
    return tensor[0, 0].numel()


def _norms(weights: Sequence[Tensor]) -> Tensor:
    from fedprior.kernels.gate_kernels import norm_kernel

    given = [strided(w) for w in weights]
    clients, total, first = len(given[0]), sum(w.shape[1] for w in given), 0
    out = given[0].new_empty(clients, total)
    with target(out):
        for w in given:
            units = w.shape[1]
            norm_kernel[(units * clients,)](w, out, w.stride(0), units, first, total, **_sizes(_width(w)))
            first += units
    return out


def _scale(layers: Layers, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    from fedprior.kernels.gate_kernels import scale_kernel

    z, given = z.contiguous(), [strided(t) for t in tensors]
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
    with target(z):
        for slot in _slots(layers):
            three = _three(given[slot.at])
            width = _width(three[0])
            scale_kernel[(slot.units * len(z),)](
                *three, z, *_three(out[slot.at]), *_strides(three), slot.units, slot.first, slot.total,
                **slot.options(width),
            )  # fmt: skip
    return tuple(out)


def _scale_backward(
    layers: Layers, z: Tensor, grads: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    from fedprior.kernels.gate_kernels import scale_backward_kernel

    z, slopes, given = z.contiguous(), [strided(g) for g in grads], [strided(t) for t in tensors]
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
    dz = torch.empty_like(z)
    with target(z):
        for slot in _slots(layers):
            g, three = _three(slopes[slot.at]), _three(given[slot.at])
            width = _width(three[0])
            scale_backward_kernel[(slot.units * len(z),)](
                *g, *three, z, *_three(out[slot.at]), dz, *_strides(g), *_strides(three),
                slot.units, slot.first, slot.total, **slot.options(width),
            )  # fmt: skip
    return dz, *out


def plain_scale(layers: Layers, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The product from torch's own operations."""
    scaled: tuple[Tensor, ...] = torch.func.vmap(lambda z, *t: tuple(scale_rows.plain(layers, z, t)))(z, *tensors)
    return scaled


class Norms(Batched):
    """Maps groups to norms."""

    @staticmethod
    def forward(*weights: Tensor) -> Tensor:
        return _norms(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


class Scale(Batched):
    """Maps gates and groups to the groups times the gates."""

    @staticmethod
    def forward(layers: Layers, z: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _scale(layers, z, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layers, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, *tensors = ctx.saved_tensors
        return None, *ScaleGradient.apply(ctx.layers, z, *grads, *tensors)


class ScaleGradient(Batched):
    """Maps gates, gradients and groups to the gradients of gates and groups; its own derivative is torch's."""

    @staticmethod
    def forward(layers: Layers, z: Tensor, *both: Tensor) -> tuple[Tensor, ...]:
        half = len(both) // 2
        return _scale_backward(layers, z, both[:half], both[half:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layers, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        layers, half = ctx.layers, len(ctx.saved_tensors) // 2

        def gradients(z: Tensor, *both: Tensor) -> Any:
            pull = torch.func.vjp(lambda z, *tensors: plain_scale(layers, z, tensors), z, *both[half:])[1]
            return pull(both[:half])

        return None, *torch.func.vjp(gradients, *ctx.saved_tensors)[1](cotangents)
