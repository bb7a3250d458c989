"""Gates on groups of weights: norms, the product with the gates, and both gradients in one pass over the weights.

Tensors carry the clients in front. A layer of `units` gates has a weight with one row per gate and up to two vectors
with one entry per gate (a bias, or a norm's weight and bias). `units/rows.py` does the same in torch's own operations.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprior.kernels.function import Batched
from fedprior.kernels.launch import strided, target
from fedprior.units.rows import Rows, scale_rows

BLOCK = 1024
LAYERS = 24
"""How many layers one launch takes: its arguments must fit into 4 KiB."""
Layers = tuple[Rows, ...]


def norms(weights: Sequence[Tensor]) -> Tensor:
    """`rows.row_norms`."""
    found: Tensor = Norms.apply(*(t.detach().unsqueeze(0) for t in weights))
    return found.squeeze(0)


def scale(layers: Layers, gates: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`rows.scale_rows`."""
    out = Scale.apply(layers, gates.unsqueeze(0), *(t.unsqueeze(0) for t in tensors))
    return [t.squeeze(0) for t in out]


class Launch(NamedTuple):
    """What one launch works on: some tensors of layers that stand side by side, and where their gates stand."""

    tensors: slice
    begin: tuple[int, ...]
    """For each tensor, the place of its first gate in the vector of all."""
    end: tuple[int, ...]
    """That behind its last one."""

    def programs(self, clients: int) -> tuple[int]:
        """One for each gate of each client."""
        return ((self.end[-1] - self.begin[0]) * clients,)

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Compile-time sizes: also the entries of each tensor's rows, and how many are read at a time."""
        widths = tuple(t[0, 0].numel() for t in tensors)
        blocks = tuple(min(BLOCK, max(32, 1 << (width - 1).bit_length())) for width in widths)
        warps = 4 if max(blocks) >= 512 else 1
        return {"BEGIN": self.begin, "END": self.end, "WIDTHS": widths, "BLOCKS": blocks, "num_warps": warps}


def _launches(layers: Sequence[Rows]) -> Iterator[Launch]:
    """One launch for as many layers as it takes."""
    ends = list(accumulate(layer.units for layer in layers))
    places = [(end - layer.units, end) for layer, end in zip(layers, ends, strict=True)]
    start = 0
    for i in range(0, len(layers), LAYERS):
        chosen = list(zip(layers, places, strict=True))[i : i + LAYERS]
        begin, end = zip(*(place for layer, place in chosen for _ in range(layer.tensors)), strict=True)
        yield Launch(slice(start, start + len(begin)), begin, end)
        start += len(begin)


def _strides(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(t.stride(0) for t in tensors)


def _norms(weights: Sequence[Tensor]) -> Tensor:
    from fedprior.kernels.gate_kernels import norm_kernel

    given = [strided(w) for w in weights]
    total = sum(w.shape[1] for w in given)
    out = given[0].new_empty(len(given[0]), total)
    with target(out):
        for launch in _launches([Rows(w.shape[1], 1) for w in given]):
            mine = tuple(given[launch.tensors])
            norm_kernel[launch.programs(len(out))](mine, _strides(mine), out, total, **launch.sizes(mine))
    return out


def _scale(layers: Layers, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    from fedprior.kernels.gate_kernels import scale_kernel

    z, given = z.contiguous(), [strided(t) for t in tensors]
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
    with target(z):
        for launch in _launches(layers):
            mine = tuple(given[launch.tensors])
            scale_kernel[launch.programs(len(z))](
                mine, tuple(out[launch.tensors]), _strides(mine), z, z.shape[1], **launch.sizes(mine)
            )
    return tuple(out)


def _scale_backward(
    layers: Layers, z: Tensor, grads: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    from fedprior.kernels.gate_kernels import scale_backward_kernel

    z, slopes, given = z.contiguous(), [strided(g) for g in grads], [strided(t) for t in tensors]
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in given]
    dz = torch.empty_like(z)
    with target(z):
        for launch in _launches(layers):
            g, mine = tuple(slopes[launch.tensors]), tuple(given[launch.tensors])
            scale_backward_kernel[launch.programs(len(z))](
                g, mine, tuple(out[launch.tensors]), _strides(g), _strides(mine), z, dz, z.shape[1],
                **launch.sizes(mine),
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
