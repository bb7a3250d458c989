"""A model as a pure function of its parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedprior import kernels, keys
from fedprior.trees import Params

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets to one loss an example."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The default loss: softmax cross-entropy, one number an example."""
    if kernels.usable(outputs) and outputs.dim() == 2 and targets.dtype == torch.int64:
        # Under `vmap` torch's own is some ten operations; labels need no check, because data sets were checked.
        return -F.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)
    return F.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class Network:
    """An `nn.Module`, an example input (without the batch dimension), and its loss."""

    module: nn.Module
    example: Tensor
    loss: Loss = cross_entropy
    tied: dict[str, str] = field(init=False)
    """Where a parameter stands a second time, and its name where it stands first."""

    def __post_init__(self) -> None:
        first = {id(p): name for name, p in self.module.named_parameters()}
        slots = (
            (f"{prefix}.{name}" if prefix else name, p)
            for prefix, module in self.module.named_modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        tied = {slot: first[id(p)] for slot, p in slots if slot != first[id(p)]}
        object.__setattr__(self, "tied", tied)

    def params(self) -> Params:
        """A copy of the module's own parameters."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """The module's outputs with other parameters, without dropout."""
        self.module.eval()
        return self._run(params, x)

    def training_loss(self, params: Params, x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor) -> Tensor:
        """The mean loss of a batch; examples of weight zero are padding."""
        return _mean(self.training_losses(params, x, y, key), weight)

    def training_losses(self, params: Params, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        """One loss an example, with dropout drawn from the key."""
        self.module.train()
        # Always on, because `forward` may call dropout as a plain function; it costs next to nothing.
        with _KeyedDropout(key):
            outputs = self._run(params, x)
        return self.loss(outputs, y)

    def evaluation_loss(self, params: Params, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """The same without dropout."""
        return _mean(self.loss(self.predict(params, x), y), weight)

    def _run(self, params: Params, x: Tensor) -> Tensor:
        # torch's own tie_weights leaves the values of this call in a module that is registered under two names
        # (pytorch#164759), so tied parameters are passed by name.
        tied = {slot: params[name] for slot, name in self.tied.items() if name in params}
        with kernels.routed(x):
            out: Tensor = torch.func.functional_call(self.module, {**params, **tied}, (x,), tie_weights=False)
        return out


def _mean(losses: Tensor, weight: Tensor | None) -> Tensor:
    return losses.mean() if weight is None else (losses * weight).sum() / weight.sum().clamp(min=1)


class _KeyedDropout(TorchFunctionMode):
    """Draws dropout's masks from a key, so that they are the same in every engine and after a resume."""

    CHANNELWISE: ClassVar = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.dropout and func not in self.CHANNELWISE:
            return func(*args, **kwargs)
        return self._drop(func, *args, **kwargs)

    def _drop(self, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0
        self.calls += 1
        key = keys.fold(self.key, self.calls)
        spatial = self.CHANNELWISE.get(func, 0)
        if not spatial:
            return keys.dropout(x, key, p)
        ones = torch.ones(*x.shape[: x.dim() - spatial], *[1] * spatial, dtype=x.dtype, device=x.device)
        return x * keys.dropout(ones, key, p)
