"""A linear layer with one weight set per client: torch's batched products, with gradients laid out like the weights.

Under `vmap`, torch's own layer gives the weights' gradient transposed. An optimiser's step then reads it across rows,
which is several times slower, and takes one parameter at a time.
"""

from typing import Any

import torch
from torch import Tensor

from fedprior.kernels.function import Batched


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` for inputs and weights that `vmap` batches."""
    flat = x.reshape(1, -1, x.shape[-1])
    out: Tensor = Linear.apply(flat, weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0))
    return out.reshape(*x.shape[:-1], weight.shape[0])


class Linear(Batched):
    """Inputs (clients, images, inputs), weights (clients, outputs, inputs) and biases (clients, outputs) to outputs."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.bmm(x, weight.transpose(1, 2))
        return out if bias is None else out.add_(bias.unsqueeze(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias = inputs
        ctx.bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(grad.transpose(1, 2), x) if ctx.needs_input_grad[1] else None
        return dx, dw, grad.sum(1) if ctx.bias else None
