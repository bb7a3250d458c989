"""The batched convolution as differentiable functions that `torch.func` can batch and differentiate again.

Under `vmap` the batch dimension folds into the clients' dimension, so any nesting of `vmap` and `grad` ends in one
launch. A gradient that is not needed (of the first layer's input) is not computed.
"""

from typing import Any

from torch import Tensor

from fedprior.kernels import conv
from fedprior.kernels.conv import Pair
from fedprior.kernels.function import Batched


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """`torch.nn.functional.conv2d` for inputs and weights that `vmap` batches."""
    lifted = None if bias is None else bias.unsqueeze(0)
    out: Tensor = Convolution.apply(x.unsqueeze(0), weight.unsqueeze(0), lifted, stride, padding)[0]
    return out.squeeze(0)


class Convolution(Batched):
    """Maps inputs and weights to outputs, and to the weights' copy, which the input's gradient reads again."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        copy = conv.weight_copy(weight)
        return conv.forward(x, weight, bias, stride, padding, copy=copy), copy

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.bias = bias is not None
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        x, weight, copy = ctx.saved_tensors
        dx = dw = db = None
        if grad is None:
            return None, None, None, None, None
        if ctx.needs_input_grad[0]:
            dx = InputGradient.apply(grad, weight, copy, tuple(x.shape[3:]), ctx.stride, ctx.padding)
        if any(ctx.needs_input_grad[1:3]):
            dw, db = WeightGradient.apply(x, grad, tuple(weight.shape[3:]), ctx.stride, ctx.padding, ctx.bias)
        return dx, dw, db if ctx.bias else None, None, None


class InputGradient(Batched):
    """Maps the outputs' gradient and weights (with their copy or without) to the inputs' gradient: linear in both."""

    @staticmethod
    def forward(grad: Tensor, weight: Tensor, copy: Tensor | None, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return conv.grad_input(grad, weight, size, stride, padding, copy=copy)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, weight, _, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(grad, weight)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        grad, weight = ctx.saved_tensors
        dg = dw = None
        if ctx.needs_input_grad[0]:
            dg = Convolution.apply(cotangent, weight, None, ctx.stride, ctx.padding)[0]
        if ctx.needs_input_grad[1]:
            kernel = tuple(weight.shape[3:])
            dw, _ = WeightGradient.apply(cotangent, grad, kernel, ctx.stride, ctx.padding, False)
        return dg, dw, None, None, None, None


class WeightGradient(Batched):
    """Maps inputs and the outputs' gradient to the gradients of weights and bias: linear in both."""

    @staticmethod
    def forward(
        x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair, bias: bool
    ) -> tuple[Tensor, Tensor]:
        return conv.grad_weight(x, grad, kernel, stride, padding, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, grad, _, ctx.stride, ctx.padding, ctx.bias = inputs
        ctx.save_for_backward(x, grad)

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor) -> Any:
        x, grad = ctx.saved_tensors
        dx = dg = None
        if ctx.needs_input_grad[0]:
            dx = InputGradient.apply(grad, weight, None, tuple(x.shape[3:]), ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            dg = Convolution.apply(x, weight, bias if ctx.bias else None, ctx.stride, ctx.padding)[0]
        return dx, dg, None, None, None, None
