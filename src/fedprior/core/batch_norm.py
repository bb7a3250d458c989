"""BatchNorm as pure functions: the statistics of a batch's real examples, and of many batches together.

A module's own `F.batch_norm` would include padding, change its buffers while it runs, and hide the statistics that it
finds. These functions use plain tensors and work both for one client and under `vmap`.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedprior.core.errors import ModelError
from fedprior.core.operations import operation
from fedprior.core.trees import Params

MEAN, VARIANCE, COUNT = "running_mean", "running_var", "count"


class Norm(NamedTuple):
    """A layer that stores statistics."""

    name: str
    """The prefix of its buffers' names: `blocks.0.norm1.`."""
    size: int
    """The number of channels."""
    momentum: float | None
    """The momentum of its running averages; None for a plain average of all batches."""


def find_norms(module: nn.Module) -> tuple[Norm, ...]:
    """Find the layers with a running mean and variance: torch's own, or code that calls `F.batch_norm`."""
    buffers = dict(module.named_buffers())
    norms = []
    for path, buffer in buffers.items():
        prefix = path.removesuffix(MEAN)
        if prefix != path and prefix + VARIANCE in buffers:
            owner = module.get_submodule(prefix.rstrip("."))
            norms.append(Norm(prefix, buffer.numel(), getattr(owner, "momentum", 0.1)))
    return tuple(norms)


def forget(module: nn.Module, norm: Norm) -> None:
    """Make a layer use its batch's statistics in evaluation too, like a torch layer that tracks none."""
    owner = module.get_submodule(norm.name.rstrip("."))
    owner._buffers[MEAN] = owner._buffers[VARIANCE] = None
    if isinstance(owner, nn.modules.batchnorm._BatchNorm):
        owner.num_batches_tracked, owner.track_running_stats = None, False


def joint(norms: tuple[Norm, ...], statistics: Params) -> tuple[Tensor, Tensor]:
    """Join the means of all layers in one vector, and the variances in another: many short operations are slow."""
    mean, variance = (torch.cat([statistics[n.name + part] for n in norms], -1) for part in (MEAN, VARIANCE))
    return mean, variance


def parted(norms: tuple[Norm, ...], mean: Tensor, variance: Tensor) -> Params:
    """The inverse of `joint`."""
    sizes = [norm.size for norm in norms]
    pairs = zip(norms, mean.split(sizes, -1), variance.split(sizes, -1), strict=True)
    return {n.name + part: value for n, *both in pairs for part, value in zip((MEAN, VARIANCE), both, strict=True)}


def pooled(mean: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Combine means and variances along the first dimension into those of the union: the law of total variance.

    `weight` is the number of examples in each part. If there are none at all, mean and variance are zero.
    """
    share = weight / weight.sum(0).clamp(min=torch.finfo(weight.dtype).tiny)
    whole = (share * mean).sum(0)
    return whole, (share * (variance + (mean - whole).square())).sum(0)


class BatchNorm(TorchFunctionMode):
    """Intercepts every `batch_norm` of a model, normalises by the batch's own statistics, and keeps them.

    `weight` is 1 for an example and 0 for padding.
    """

    def __init__(self, names: Mapping[int, str], weight: Tensor | None) -> None:
        super().__init__()
        self.names, self.weight = names, weight
        self.found: dict[str, tuple[Tensor, Tensor, int]] = {}
        """For each layer, by name: mean, variance and the number of values behind them, with those of padding."""

    def correction(self, values: int) -> Tensor | float:
        """n / (n − 1), which makes the variance of a batch that of a sample, where n of these values are no padding."""
        if self.weight is None:
            return values / max(values - 1, 1)
        count = self.weight.sum() * (values // len(self.weight))
        return count / (count - 1).clamp(min=1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._normalise(*args, **kwargs)
        if func is torch.batch_norm:
            x, weight, bias, mean, variance, training, momentum, eps = args[:8]
            return self._normalise(x, mean, variance, weight, bias, training, momentum, eps)
        return func(*args, **kwargs)

    def _normalise(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        out, mean, variance = normalise(input, self.weight, weight, bias, eps)
        if running_mean is not None and running_var is not None:
            self._keep(running_mean, mean, variance, input.shape[0] * prod(input.shape[2:]))
        return out

    def _keep(self, buffer: Tensor, mean: Tensor, variance: Tensor, values: int) -> None:
        name = self.names.get(id(buffer))
        if name is None:
            raise ModelError(
                "the model calls batch_norm with statistics that are not registered as buffers running_mean and "
                "running_var; use nn.BatchNorm, or register them under these names"
            )
        if name in self.found:  # a layer that is called twice
            before = self.found[name]
            # Every call has the same share of padding.
            parts = [
                (before[0], before[1], mean.new_full((1,), before[2])),
                (mean, variance, mean.new_full((1,), values)),
            ]
            mean, variance = pooled(*(torch.stack(part) for part in zip(*parts, strict=True)))
            values += before[2]
        self.found[name] = (mean, variance, values)


@operation
def normalise(
    x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise x by its real examples; also return their mean and their variance."""
    shape = (-1, *[1] * (x.dim() - 2))
    mean, variance = moments(x, real)
    scale = (variance + eps).rsqrt()
    scale = (scale if weight is None else scale * weight).reshape(shape)
    centred = x - mean.reshape(shape)
    return centred * scale if bias is None else torch.addcmul(bias.reshape(shape), centred, scale), mean, variance


def moments(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each channel's mean and variance (biased, as in training), over examples of weight 1."""
    dims = [0, *range(2, x.dim())]
    if weight is None:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return mean, variance
    weight = weight.to(x.dtype)
    count = weight.sum() * prod(x.shape[2:])
    share = (weight / count.clamp(min=1)).reshape(-1, *[1] * (x.dim() - 1))
    mean = (x * share).sum(dims)
    centred = x - mean.reshape(-1, *[1] * (x.dim() - 2))
    return mean, (centred.square() * share).sum(dims)
