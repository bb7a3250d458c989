"""A norm without closed channels that still counts them in its statistics. Exported models contain its source."""

import torch
from torch import Tensor, nn


class PrunedNorm(nn.Module):
    """GroupNorm or LayerNorm without the channels that are always zero.

    They have no output, but their zeros still count in the mean and variance of their group: `kept` is the number of
    channels left in each group, out of `channels`. Statistics run over the dimensions from `axis` on.
    """

    def __init__(
        self, kept: tuple[int, ...], channels: int, shape: tuple[int, ...], axis: int, eps: float, bias: bool
    ) -> None:
        super().__init__()
        self.kept, self.channels, self.shape, self.axis, self.eps = kept, channels, shape, axis, eps
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        dims = tuple(range(self.axis, x.dim()))
        shape = self.shape + (1,) * (len(dims) - len(self.shape))
        means, deviations = [], []
        for part in x.split(self.kept, self.axis):
            share = part.shape[self.axis] / self.channels
            variance, mean = torch.var_mean(part, dims, correction=0, keepdim=True)
            variance = share * variance + share * (1 - share) * mean.square()  # adds the missing zeros
            spread = [-1] * x.dim()
            spread[self.axis] = part.shape[self.axis]
            means.append((share * mean).expand(spread))
            deviations.append((variance + self.eps).rsqrt().expand(spread))
        # Everything computed from the input is small; the input itself is read and written once.
        scale = torch.cat(deviations, self.axis) * self.weight.reshape(shape)
        shift = -torch.cat(means, self.axis) * scale
        return x * scale + (shift if self.bias is None else shift + self.bias.reshape(shape))

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.kept}, channels={self.channels}, shape={self.shape}, axis={self.axis}, eps={self.eps}, {bias=}"
