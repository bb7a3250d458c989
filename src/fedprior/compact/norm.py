"""A norm that has lost channels but not their share in its statistics. Its source is copied into exported models."""

import torch
from torch import Tensor, nn


class PrunedNorm(nn.Module):
    """GroupNorm or LayerNorm without the channels that are always zero.

    They had no output, but their zeros were counted in the mean and variance of their group, and still are: `kept` says
    how many channels of each group are left, of `channels`. Statistics run over the dimensions from `axis` on.
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
        groups = []
        for part, kept in zip(x.split(self.kept, self.axis), self.kept, strict=True):
            share = kept / self.channels
            mean = part.mean(dims, keepdim=True) * share
            centred = part - mean
            variance = centred.square().mean(dims, keepdim=True) * share + mean.square() * (1 - share)
            groups.append(centred * (variance + self.eps).rsqrt())
        shape = self.shape + (1,) * (len(dims) - len(self.shape))
        out = torch.cat(groups, self.axis) * self.weight.reshape(shape)
        return out if self.bias is None else out + self.bias.reshape(shape)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.kept}, channels={self.channels}, shape={self.shape}, axis={self.axis}, eps={self.eps}, {bias=}"
