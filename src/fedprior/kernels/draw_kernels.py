"""Triton code of keyed draws: what `fedprior.core.keys` does in some twenty operations, each in one launch."""

import triton
import triton.language as tl


@triton.jit
def lanes(count, BLOCK: tl.constexpr):
    """This program's row, and its places among the row's `count`; `launch.row_grid` covers them all."""
    blocks = tl.cdiv(count, BLOCK)
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _mix(x):
    """SplitMix64's mixing function."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _bits(keys, row, i):
    """The i-th number of a key."""
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    return _mix(key + (i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def draw(keys, row, i):
    """Its upper 23 bits as a number strictly between 0 and 1."""
    return ((_bits(keys, row, i) >> 41).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def uniform_kernel(keys, out, count, BLOCK: tl.constexpr):
    """Uniform numbers, one key per row."""
    row, i = lanes(count, BLOCK)
    tl.store(out + row * count + i, draw(keys, row, i), mask=i < count)


@triton.jit
def bits_kernel(keys, out, count, BLOCK: tl.constexpr):
    """64-bit numbers, one key per row."""
    row, i = lanes(count, BLOCK)
    tl.store(out + row * count + i, _bits(keys, row, i).to(tl.int64, bitcast=True), mask=i < count)


@triton.jit
def dropout_kernel(x, keys, out, count, rate, scale, BLOCK: tl.constexpr):
    """x · scale where the draw is at least the rate, else zero; one key per row."""
    row, i = lanes(count, BLOCK)
    inside = i < count
    value = tl.load(x + row * count + i, mask=inside, other=0.0)
    keep = tl.where(draw(keys, row, i) >= rate, scale, 0.0)
    tl.store(out + row * count + i, value * keep, mask=inside)


# One program for all shapes and strides: compiling takes longer than running any of them.
@triton.jit(
    do_not_specialize=["number", "total", "columns", "key_row", "key_column", "data_row", "data_column"],
)
def fold_kernel(
    keys, data, out, number, total, columns, key_row, key_column, data_row, data_column,
    NUMBER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A new key from a key and either one number, already mixed, or the entry of `data` at the same place."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    row, column = (i // columns).to(tl.int64), (i % columns).to(tl.int64)
    key = tl.load(keys + row * key_row + column * key_column, mask=inside, other=0).to(tl.uint64, bitcast=True)
    key = _mix(key + 0x9E3779B97F4A7C15)
    if NUMBER:
        key = key ^ number.to(tl.int64).to(tl.uint64, bitcast=True)
    else:
        at = data + row * data_row + column * data_column
        key = key ^ _mix(tl.load(at, mask=inside, other=0).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    tl.store(out + i, _mix(key).to(tl.int64, bitcast=True), mask=inside)
