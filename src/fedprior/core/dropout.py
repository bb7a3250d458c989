"""Draw dropout from a key wherever a module uses it: as a layer or function, between an LSTM's layers, in attention.

torch has one generator per process, whose state depends on earlier draws. With keys, the masks are the same in every
engine and after a resume.
"""

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedprior.core import keys
from fedprior.core.operations import batched

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""The functions behind torch's recurrent layers. They draw internally, where no mode can intercept."""


def recurrent(module: nn.Module) -> str:
    """The kind of a recurrent layer in a module, or "" if it has none: torch cannot run these under `vmap`."""
    return next((type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase)), "")


class KeyedDropout(TorchFunctionMode):
    """Draws dropout masks from a key. Without a key, it only makes attention work under `vmap`."""

    CHANNELWISE: ClassVar = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.key is not None and (func is F.dropout or func in self.CHANNELWISE):
            return self._drop(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._with_ours(func)(*args, **kwargs)
        if self.key is not None and getattr(func, "__name__", "") in RECURRENT:
            return self._recur(func, *args)
        return func(*args, **kwargs)

    def _drop(self, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0 or self.key is None:
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

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(q kᵀ · scale + mask) v as documented by torch, with dropout of the probabilities from the key."""
        if dropout_p == 0 and not batched(query):  # torch's fast kernels have no rule for `vmap`
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._drop(F.dropout, scores.softmax(-1), dropout_p) @ value

    def _with_ours(self, func: Any) -> Callable[..., Any]:
        """Run torch's own function with our dropout: calls inside it do not reach this mode."""

        def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return self._drop(F.dropout, x, p, training)

        ours = {"dropout": dropout, "scaled_dot_product_attention": self._attend, "has_torch_function": _nobody}
        return FunctionType(func.__code__, func.__globals__ | ours, func.__name__, func.__defaults__, func.__closure__)

    def _recur(self, func: Any, *args: Any) -> Any:
        """Run a recurrent network layer by layer, with dropout after every layer but the last."""
        packed = isinstance(args[2], Tensor | tuple)  # (data, batch_sizes, hx, …) instead of (input, hx, …)
        before, (hidden, weights, biased, layers, rate, training, *rest) = args[: 1 + packed], args[1 + packed :]
        if not training or rate == 0 or layers == 1:
            return func(*args)
        x, found = before[0], []
        each, ways = len(weights) // layers, (hidden[0] if isinstance(hidden, Sequence) else hidden).shape[0] // layers
        for layer in range(layers):
            own = weights[layer * each : (layer + 1) * each]
            part = slice(layer * ways, (layer + 1) * ways)
            start = tuple(h[part] for h in hidden) if isinstance(hidden, Sequence) else hidden[part]
            x, *ends = func(x, *before[1:], start, own, biased, 1, 0.0, training, *rest)
            x = self._drop(F.dropout, x, rate) if layer < layers - 1 else x
            found.append(ends)
        return x, *(torch.cat(ends) for ends in zip(*found, strict=True))


def _nobody(*tensors: Any) -> bool:
    return False
