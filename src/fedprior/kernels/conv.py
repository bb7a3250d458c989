"""Launching the batched convolution: shapes, tile sizes, and the three products a training step needs.

All tensors carry the clients in front: inputs (clients, images, channels, rows, columns), weights (clients, outputs,
inputs, rows, columns), biases (clients, outputs).
"""

from dataclasses import dataclass
from math import prod

from torch import Tensor

from fedprior.kernels.launch import blocks, cdiv, power, precision, row_grid, strided, target

Pair = tuple[int, int]

PROGRAMS = 528
"""How many programs keep a large GPU busy: four on each of 132 multiprocessors."""
SUMMED = 4096
"""How many numbers a program of the bias's gradient reads at once: few programs must keep the memory busy."""


@dataclass(frozen=True)
class Tile:
    """How one program's work is divided; all sizes are powers of two, at least 16."""

    outputs: int
    """Output channels (of the weights, in the weights' gradient)."""
    positions: int
    """Image positions."""
    depth: int
    """Taps × channels: the summed index, or the rows of the weights' gradient."""
    warps: int = 4
    stages: int = 3
    swap: bool = False
    """Whether positions (or taps × channels) are the rows of the tensor cores' product."""
    unroll: bool = False
    """Whether the loop over taps × channels is unrolled, which turns the taps into constants."""
    last: bool = False
    """Whether the input is first copied to channels last: one copy, then a quarter of the loads at every tap."""
    splits: int = 1
    """Number of shares of the positions, in the weights' gradient only."""


@dataclass(frozen=True)
class Geometry:
    """A convolution's sizes, without clients and images."""

    inputs: int
    outputs: int
    size: Pair
    kernel: Pair
    stride: Pair
    padding: Pair

    @property
    def out_size(self) -> Pair:
        """Rows and columns of the output."""
        rows, columns = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip(self.size, self.kernel, self.stride, self.padding, strict=True)
        )
        return rows, columns

    @property
    def depth(self) -> int:
        """The number of weights of one output channel."""
        return self.inputs * prod(self.kernel)

    @staticmethod
    def of(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> "Geometry":
        """From the input's and the weights' shapes."""
        rows, columns = x.shape[3:]
        _, outputs, inputs, high, wide = weight.shape
        return Geometry(inputs, outputs, (rows, columns), (high, wide), stride, padding)


def choose(channels: int, outputs: int, taps: int, positions: int, clients: int) -> Tile:
    """The tile of the convolution (or its transpose, with the channel counts swapped), from benchmarks/kernels.py."""
    rows = min(64, power(outputs))
    depth = next((d for d in (32, 16) if channels % d == 0), min(32, power(channels * taps)))
    tiles = cdiv(outputs, rows) * clients
    block = next((b for b in (128, 64) if cdiv(positions, b) * tiles >= PROGRAMS // 2), 32)
    unroll = channels % depth != 0 and cdiv(channels * taps, depth) <= 8
    last = channels % 16 == 0 and taps >= 9
    return Tile(rows, block, depth, warps=4 if block * rows > 2048 else 2, swap=unroll, unroll=unroll, last=last)


def choose_weight(outputs: int, depth: int, positions: int, clients: int) -> Tile:
    """The tile of the weights' gradient, from benchmarks/kernels.py."""
    rows = min(64, power(outputs))
    block = min(128 if rows == 64 or depth < 128 else 64, power(depth))
    tiles = cdiv(outputs, rows) * cdiv(depth, block) * clients
    return Tile(rows, 32, block, swap=rows < 64 <= block, splits=shares(tiles, positions, 320))


def shares(programs: int, count: int, least: int) -> int:
    """Into how many shares a sum over `count` is split, of at least `least` each, if there are too few programs.

    >>> shares(320, 64, 11), shares(60, 64, 11), shares(1, 1, 9)
    (1, 4, 1)
    """
    splits = 1
    while splits < 64 and programs * splits < PROGRAMS // 2 and count >= 2 * splits * least:
        splits *= 2
    return splits


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    tile: Tile | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """The convolution; `copy` is `weight_copy(weight)`, where it is already there."""
    g = Geometry.of(x, weight, stride, padding)
    out = x.new_empty(*x.shape[:2], g.outputs, *g.out_size)
    positions = x.shape[1] * prod(g.out_size)
    tile = tile or choose(g.inputs, g.outputs, prod(g.kernel), positions, x.shape[0])
    _contract(x, _last(weight, copy), bias, out, g, tile, transposed=False)
    return out


def grad_input(
    grad: Tensor,
    weight: Tensor,
    size: Pair,
    stride: Pair,
    padding: Pair,
    tile: Tile | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """The gradient for an input of this many rows and columns: the transposed convolution."""
    out = grad.new_empty(*grad.shape[:2], weight.shape[2], *size)
    g = Geometry.of(out, weight, stride, padding)
    positions = out.shape[1] * prod(size)
    tile = tile or choose(g.outputs, g.inputs, prod(g.kernel), positions, grad.shape[0])
    _contract(grad, _last(weight, copy), None, out, g, tile, transposed=True)
    return out


def weight_copy(weight: Tensor) -> Tensor:
    """The weights channels-last, for a convolution and its input's gradient; empty where the weights are so already."""
    clients, _, inputs, *kernel = weight.shape
    return weight.new_empty(clients, 0) if inputs == 1 or prod(kernel) == 1 else channels_last(weight)


def _last(weight: Tensor, copy: Tensor | None) -> Tensor:
    return channels_last(weight) if copy is None or copy.numel() == 0 else strided(copy)


def channels_last(x: Tensor) -> Tensor:
    """(clients, images, channels, rows, columns) to (clients, images, rows · columns, channels): a tap's block."""
    from fedprior.kernels.conv_kernels import last_kernel

    x = strided(x)
    clients, images, channels, *size = x.shape
    places = prod(size)
    if channels == 1 or places == 1:
        return x.reshape(clients, images, places, channels).contiguous()
    out = x.new_empty(clients, images, places, channels)
    rows, columns = min(32, power(channels)), min(64, power(places))
    grid = (cdiv(places, columns) * cdiv(channels, rows) * images * clients,)
    with target(x):
        last_kernel[grid](x, out, x.stride(0), images, channels, places, BC=rows, BS=columns, num_warps=4)
    return out


def _contract(
    source: Tensor, last: Tensor, bias: Tensor | None, out: Tensor, g: Geometry, tile: Tile, transposed: bool
) -> None:
    from fedprior.kernels.conv_kernels import contract_kernel

    sizes = source.shape[2:]
    source = strided(source)
    if tile.last:
        source = channels_last(source)
    clients, images, channels, *to = out.shape
    positions = images * prod(to)
    bias = None if bias is None else strided(bias)
    grid = (cdiv(positions, tile.positions) * cdiv(channels, tile.outputs) * clients,)
    with target(source):
        contract_kernel[grid](
            source, last, source if bias is None else bias, out,
            source.stride(0), last.stride(0), 0 if bias is None else bias.stride(0),
            positions, *sizes, channels, *to, *g.kernel, *g.stride, *g.padding,
            TRANSPOSED=transposed, BIAS=bias is not None, PRECISION=precision(), SWAP=tile.swap, LAST=tile.last,
            UNROLL=tile.unroll, BO=tile.outputs, BM=tile.positions, BK=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def grad_weight(
    x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair, bias: bool, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients for the weights and for the bias (empty if there is none)."""
    from fedprior.kernels.conv_kernels import reduce_kernel, weight_kernel

    x, grad = strided(x), strided(grad)
    clients, images, outputs, *to = grad.shape
    inputs, positions = x.shape[2], images * prod(to)
    depth = inputs * prod(kernel)
    tile = tile or choose_weight(outputs, depth, positions, clients)
    weight = x.new_empty(clients, outputs, inputs, *kernel)
    size = outputs * depth
    partial = x.new_empty(clients, tile.splits, size)
    share = cdiv(cdiv(positions, tile.splits), tile.positions) * tile.positions
    grid = (cdiv(depth, tile.depth) * cdiv(outputs, tile.outputs) * tile.splits * clients,)
    with target(x):
        weight_kernel[grid](
            x, grad, partial, x.stride(0), grad.stride(0),
            positions, share, *x.shape[2:], outputs, *to, *kernel, *stride, *padding,
            PRECISION=precision(), SWAP=tile.swap, SPLITS=tile.splits, BO=tile.outputs, BM=tile.positions,
            BK=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        block = max(32, 4096 // tile.splits) if tile.splits > 4 else 512
        reduce_kernel[row_grid(clients, size, block)](
            partial, weight, inputs, outputs, prod(kernel), SPLITS=tile.splits, BLOCK=block, num_warps=4
        )
    # Not in the kernel: with one more use of the gradient there, Triton 3.6 gave wrong products on an H200.
    return weight, grad_bias(grad) if bias else x.new_empty(clients, 0)


def grad_bias(grad: Tensor, splits: int = 0) -> Tensor:
    """The gradient for the bias: `grad.sum((1, 3, 4))`, added up in one fixed order."""
    from fedprior.kernels.conv_kernels import bias_kernel, reduce_kernel

    grad = strided(grad)
    clients, images, outputs, size = *grad.shape[:3], prod(grad.shape[3:])
    splits = splits or shares(outputs * clients, images, cdiv(2 * SUMMED, size))
    share = cdiv(images, splits)
    partial = grad.new_empty(clients, splits, outputs)
    with target(grad):
        bias_kernel[(outputs * splits * clients,)](
            grad, partial, grad.stride(0), images, share, outputs, size, SPLITS=splits, **blocks(share, size, SUMMED)
        )
        if splits == 1:
            return partial.squeeze(1)
        out = grad.new_empty(clients, outputs)
        reduce_kernel[row_grid(clients, outputs, 32)](partial, out, 1, outputs, 1, SPLITS=splits, BLOCK=32, num_warps=4)
    return out
