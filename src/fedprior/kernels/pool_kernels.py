"""Triton code of the 2×2 max pool. It keeps no indices: the backward pass finds the largest again."""

import triton
import triton.language as tl


@triton.jit
def _larger(best, place, value, at: tl.constexpr):
    """torch's rule: the first of equals, and NaN above all."""
    wins = (value > best) | (value != value)
    return tl.where(wins, value, best), tl.where(wins, at, place)


@triton.jit
def pool_kernel(x, out, total, H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One output per thread."""
    OH: tl.constexpr = H // 2
    OW: tl.constexpr = W // 2
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    i = start * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    row = i // OW
    at = (row // OH * (H * W) + row % OH * (2 * W) + i % OW * 2)[:, None] + tl.arange(0, 2)[None, :]
    a, b = tl.split(tl.load(x + at, mask=inside[:, None], other=0.0))
    c, d = tl.split(tl.load(x + at + W, mask=inside[:, None], other=0.0))
    best, place = _larger(a, tl.zeros_like(i), b, 1)
    best, place = _larger(best, place, c, 2)
    best, place = _larger(best, place, d, 3)
    tl.store(out + i, best, mask=inside)


@triton.jit
def pool_backward_kernel(grad, x, dx, total, H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One 2×2 window per thread, including half windows at odd edges, which get zero."""
    OH: tl.constexpr = H // 2
    OW: tl.constexpr = W // 2
    CH: tl.constexpr = (H + 1) // 2
    CW: tl.constexpr = (W + 1) // 2
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    i = start * BLOCK + tl.arange(0, BLOCK)
    plane = i // (CH * CW)
    oh = i // CW % CH
    ow = i % CW
    inside = i < total
    whole = inside
    if H % 2 + W % 2 > 0:
        whole = inside & (oh < OH) & (ow < OW)
    at = (plane * (H * W) + oh * (2 * W) + ow * 2)[:, None] + tl.arange(0, 2)[None, :]
    a, b = tl.split(tl.load(x + at, mask=whole[:, None], other=0.0))
    c, d = tl.split(tl.load(x + at + W, mask=whole[:, None], other=0.0))
    best, place = _larger(a, tl.zeros_like(i), b, 1)
    best, place = _larger(best, place, c, 2)
    best, place = _larger(best, place, d, 3)
    g = tl.load(grad + (plane * (OH * OW) + oh * OW + ow), mask=whole, other=0.0)
    top = tl.join(tl.where(place == 0, g, 0.0), tl.where(place == 1, g, 0.0))
    bottom = tl.join(tl.where(place == 2, g, 0.0), tl.where(place == 3, g, 0.0))
    ok = inside[:, None]
    if W % 2 == 1:
        ok = ok & (ow[:, None] * 2 + tl.arange(0, 2)[None, :] < W)
    tl.store(dx + at, top, mask=ok)
    if H % 2 == 1:
        ok = ok & (oh < OH)[:, None]
    tl.store(dx + at + W, bottom, mask=ok)
