"""Yogi (Zaheer et al. 2018), the server optimiser of FedYogi. torch.optim lacks it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Yogi(torch.optim.Optimizer):
    """Adam with an additive second moment: v ← v − (1 − β₂) sign(v − g²) g², so that v never jumps.

    As in Reddi et al. (2020), moments start at zero without bias correction, and eps (their τ) is large.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        if not lr >= 0 or not eps > 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Yogi takes lr >= 0, eps > 0 and betas in [0, 1), got {lr}, {eps} and {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of descent."""
        loss = closure() if closure else None
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                m: Tensor = state.setdefault("exp_avg", torch.zeros_like(p))
                v: Tensor = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                square = p.grad.square()
                m.lerp_(p.grad, 1 - first)
                v.sub_((1 - second) * (v - square).sign() * square)
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))
        return loss
