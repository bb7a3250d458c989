"""From norms and thresholds to gates and their hard-concrete draws: one launch each way instead of some ten.

Tensors carry the clients in front, one row of gates each. `priors/thresholds.py` does the same in torch's operations.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprior.kernels.function import Batched
from fedprior.kernels.launch import row_grid, target

BLOCK = 256


class Edges(NamedTuple):
    """The logit of a gate whose v lies below `edge`, which is open, and of one that the server has closed."""

    edge: float
    opened: float
    closed: float


class Stretch(NamedTuple):
    """The hard-concrete distribution's temperature and interval, and the shift that makes P(z > 0) = π."""

    beta: float
    low: float
    high: float
    shift: float


def logits_and_gates(
    norms: Tensor, v: Tensor, is_open: Tensor | None, temperature: Tensor | float, edges: Edges
) -> tuple[Tensor, Tensor]:
    """(‖w_g‖ − softplus(v)) / T of every gate and its sigmoid; differentiable in v."""
    each = temperature if isinstance(temperature, Tensor) else None
    number = 0.0 if isinstance(temperature, Tensor) else float(temperature)
    lifted = (None if t is None else t.unsqueeze(0) for t in (is_open, each))
    logits, gates = Logits.apply(norms.unsqueeze(0), v.unsqueeze(0), *lifted, number, edges)
    return logits.squeeze(0), gates.squeeze(0)


def hard_concrete(logits: Tensor, key: Tensor, stretch: Stretch) -> Tensor:
    """One draw in [0, 1] per gate from the key's uniform numbers; differentiable in the logits."""
    out: Tensor = Concrete.apply(logits.unsqueeze(0), key.unsqueeze(0), stretch)
    return out.squeeze(0)


def _grid(x: Tensor) -> tuple[int]:
    return row_grid(x.shape[0], x.shape[1], BLOCK)


def _mask(is_open: Tensor | None, other: Tensor) -> Tensor:
    return other if is_open is None else is_open.contiguous().view(torch.uint8)


class _Gradient(Batched):
    """A function that has no gradient of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        raise NotImplementedError("gates are differentiated once only; on a CPU they can be differentiated again")


class Logits(Batched):
    """Maps norms, v, open gates and temperatures to logits and gates."""

    @staticmethod
    def forward(
        norms: Tensor, v: Tensor, is_open: Tensor | None, each: Tensor | None, number: float, edges: Edges
    ) -> tuple[Tensor, Tensor]:
        from fedprior.kernels.gate_kernels import logit_kernel

        norms, v = norms.contiguous(), v.contiguous()
        logits, gates = torch.empty_like(v), torch.empty_like(v)
        with target(v):
            logit_kernel[_grid(v)](
                norms, v, _mask(is_open, v), v if each is None else each.contiguous(), number, logits, gates,
                v.shape[1], *edges, EACH=each is not None, MASK=is_open is not None, BLOCK=BLOCK,
            )  # fmt: skip
        return logits, gates

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, v, is_open, each, ctx.number, ctx.edges = inputs
        ctx.save_for_backward(v, output[1], is_open, each)

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor, grad_gates: Tensor) -> Any:
        dv = LogitsGradient.apply(grad_logits, grad_gates, *ctx.saved_tensors, ctx.number, ctx.edges)
        return None, dv, None, None, None, None


class LogitsGradient(_Gradient):
    """Maps both outputs' gradients to that of v."""

    @staticmethod
    def forward(
        grad_logits: Tensor, grad_gates: Tensor, v: Tensor, gates: Tensor, is_open: Tensor | None,
        each: Tensor | None, number: float, edges: Edges,
    ) -> Tensor:  # fmt: skip
        from fedprior.kernels.gate_kernels import logit_backward_kernel

        grad_logits, grad_gates, v, gates = (t.contiguous() for t in (grad_logits, grad_gates, v, gates))
        dv = torch.empty_like(v)
        with target(v):
            logit_backward_kernel[_grid(v)](
                grad_logits, grad_gates, v, gates, _mask(is_open, v), v if each is None else each.contiguous(),
                number, dv, v.shape[1], edges.edge, EACH=each is not None, MASK=is_open is not None, BLOCK=BLOCK,
            )  # fmt: skip
        return dv


class Concrete(Batched):
    """Maps logits and keys to draws."""

    @staticmethod
    def forward(logits: Tensor, keys: Tensor, stretch: Stretch) -> Tensor:
        from fedprior.kernels.gate_kernels import concrete_kernel

        logits, keys = logits.contiguous(), keys.contiguous()
        out = torch.empty_like(logits)
        with target(logits):
            concrete_kernel[_grid(logits)](
                logits, keys, out, logits.shape[1], stretch.shift,
                BETA=stretch.beta, LOW=stretch.low, HIGH=stretch.high, BLOCK=BLOCK,
            )  # fmt: skip
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, keys, ctx.stretch = inputs
        ctx.save_for_backward(logits, keys)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ConcreteGradient.apply(grad, *ctx.saved_tensors, ctx.stretch), None, None


class ConcreteGradient(_Gradient):
    """Maps the draws' gradient to that of the logits."""

    @staticmethod
    def forward(grad: Tensor, logits: Tensor, keys: Tensor, stretch: Stretch) -> Tensor:
        from fedprior.kernels.gate_kernels import concrete_backward_kernel

        grad, logits, keys = grad.contiguous(), logits.contiguous(), keys.contiguous()
        out = torch.empty_like(logits)
        with target(logits):
            concrete_backward_kernel[_grid(logits)](
                grad, logits, keys, out, logits.shape[1], stretch.shift,
                BETA=stretch.beta, LOW=stretch.low, HIGH=stretch.high, BLOCK=BLOCK,
            )  # fmt: skip
        return out
