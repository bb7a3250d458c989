"""Triton code of the batched convolution: one weight set per client, NCHW, as a matrix product without unfolding.

Positions are (image, row, column) flattened; the summed index is (kernel row, kernel column, channel) flattened, so
that a block of channels shares one kernel tap and its bounds checks. Every size but the number of positions is a
compile-time constant: the divisions below become multiplications or vanish.
"""

import triton
import triton.language as tl


@triton.jit
def _contract(
    acc, k0, images, weight, row, col, inside, o,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PADDED: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
    SWAP: tl.constexpr, LAST: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One block of the summed index: gathers `BK` × positions, loads channels × `BK`, multiplies."""
    K: tl.constexpr = KH * KW * C
    lane = tl.arange(0, BK)[None, :]
    # Positions come first in every gathered block: where Triton cannot tell which index is contiguous, it puts
    # neighbouring threads along the first, and neighbouring positions are adjacent in memory.
    if C % BK == 0:  # one tap: bounds and addresses depend on the position only
        tap = k0 // C + tl.zeros([1, 1], tl.int32)
        first = k0 % C
        channel = lane
    else:
        tap = (k0 + lane) // C
        first = 0
        channel = (k0 + lane) % C
    kh = tap // KW
    kw = tap % KW
    if TRANSPOSED:
        up = row[:, None] - kh
        left = col[:, None] - kw
        ok = inside[:, None] & (up >= 0) & (left >= 0)
        if SH > 1:
            ok = ok & (up % SH == 0)
            up = up // SH
        if SW > 1:
            ok = ok & (left % SW == 0)
            left = left // SW
        ok = ok & (up < H) & (left < W)
    else:
        up = row[:, None] + kh
        left = col[:, None] + kw
        ok = inside[:, None]
        if PADDED:
            ok = ok & (up.to(tl.uint32) < H) & (left.to(tl.uint32) < W)
    known = (o < O)[:, None]
    if K % BK != 0:
        ok = ok & (k0 + lane < K)
        known = known & (k0 + lane < K)
    if LAST:  # channels are adjacent: four at a time
        at = images[:, None] + ((up * W + left) * C + first)
        if C % 4 == 0:  # 16 bytes; the compiler does not see this
            at = tl.multiple_of(at, [16, 16])
        source = tl.load(at + channel, mask=ok, other=0.0)
    else:
        at = images[:, None] + (up * W + left + first * (H * W))
        source = tl.load(at + channel * (H * W), mask=ok, other=0.0)
    if TRANSPOSED:
        w = tl.load(weight + ((first + channel) * (KH * KW * O) + tap * O) + o[:, None], mask=known, other=0.0)
    else:
        w = tl.load(weight + o[:, None] * K + (k0 + lane), mask=known, other=0.0)
    if SWAP:
        acc = tl.dot(source, tl.trans(w), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(w, tl.trans(source), acc, input_precision=PRECISION)
    return acc


@triton.jit
def contract_kernel(
    source, weight, bias, out, source_stride, weight_stride, bias_stride, positions,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr, LAST: tl.constexpr,
    UNROLL: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Convolution (source = input, weights (o, kh, kw, c)), or its transpose (source = output's gradient)."""
    OUTS: tl.constexpr = (O + BO - 1) // BO
    tiles = tl.cdiv(positions, BM)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    o = tl.program_id(0) // tiles % OUTS * BO + tl.arange(0, BO)
    client = (tl.program_id(0) // tiles // OUTS).to(tl.int64)
    inside = m < positions
    image = m // (OH * OW)
    place = m % (OH * OW)
    if TRANSPOSED:
        row = place // OW + PH
        col = place % OW + PW
    else:
        row = place // OW * SH - PH
        col = place % OW * SW - PW
    images = source + client * source_stride + image * (C * H * W)
    weight += client * weight_stride
    PADDED: tl.constexpr = PH + PW > 0
    if SWAP:
        acc = tl.zeros((BM, BO), tl.float32)
    else:
        acc = tl.zeros((BO, BM), tl.float32)
    # fmt: off
    if UNROLL:  # few steps: the taps become constants
        for k0 in tl.static_range(0, KH * KW * C, BK):
            acc = _contract(acc, k0, images, weight, row, col, inside, o,
                            C, H, W, O, KH, KW, SH, SW, PADDED, TRANSPOSED, PRECISION, SWAP, LAST, BK)
    else:
        for k0 in range(0, KH * KW * C, BK):
            acc = _contract(acc, k0, images, weight, row, col, inside, o,
                            C, H, W, O, KH, KW, SH, SW, PADDED, TRANSPOSED, PRECISION, SWAP, LAST, BK)
    # fmt: on
    if SWAP:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias + client * bias_stride + o, mask=o < O, other=0.0)[:, None]
    at = out + client * positions * O + (image * (O * OH * OW) + place)[None, :]
    tl.store(at + o[:, None] * (OH * OW), acc, mask=(o < O)[:, None] & inside[None, :])


@triton.jit
def last_kernel(x, out, x_stride, images, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr):
    """Turns (channels, places) of each image into (places, channels)."""
    TILES: tl.constexpr = (S + BS - 1) // BS
    ROWS: tl.constexpr = (C + BC - 1) // BC
    s = tl.program_id(0) % TILES * BS + tl.arange(0, BS)
    c = tl.program_id(0) // TILES % ROWS * BC + tl.arange(0, BC)
    image = tl.program_id(0) // (TILES * ROWS) % images
    client = (tl.program_id(0) // (TILES * ROWS) // images).to(tl.int64)
    known = (c < C)[:, None] & (s < S)[None, :]
    value = tl.load(x + client * x_stride + image * (C * S) + (c[:, None] * S + s[None, :]), mask=known, other=0.0)
    at = out + (client * images + image) * (C * S) + (s[:, None] * C + c[None, :])
    tl.store(at, tl.trans(value), mask=(s < S)[:, None] & (c < C)[None, :])


@triton.jit
def weight_kernel(
    x, grad, partial, x_stride, grad_stride, positions, share,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr, SWAP: tl.constexpr, SPLITS: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The weights' gradient over one share of the positions, into a buffer of its own: no atomics, one fixed order."""
    K: tl.constexpr = KH * KW * C
    TILES: tl.constexpr = (K + BK - 1) // BK
    SIZE: tl.constexpr = O * K
    OUTS: tl.constexpr = (O + BO - 1) // BO
    k = tl.program_id(0) % TILES * BK + tl.arange(0, BK)
    o = tl.program_id(0) // TILES % OUTS * BO + tl.arange(0, BO)
    split = tl.program_id(0) // (TILES * OUTS) % SPLITS
    client = (tl.program_id(0) // (TILES * OUTS * SPLITS)).to(tl.int64)
    tap = k // C
    kh = tap // KW
    kw = tap % KW
    offset = (k % C) * (H * W) + kh * W + kw
    x += client * x_stride
    grad += client * grad_stride
    start = split * share
    end = tl.minimum(start + share, positions)
    if SWAP:
        acc = tl.zeros((BK, BO), tl.float32)
    else:
        acc = tl.zeros((BO, BK), tl.float32)
    for m0 in range(start, end, BM):
        m = m0 + tl.arange(0, BM)
        inside = m < end
        image = m // (OH * OW)
        place = m % (OH * OW)
        row = place // OW * SH - PH
        col = place % OW * SW - PW
        at = grad + (image * (O * OH * OW) + place)[:, None] + o[None, :] * (OH * OW)
        g = tl.load(at, mask=(o < O)[None, :] & inside[:, None], other=0.0)
        ok = (k < K)[None, :] & inside[:, None]
        if PH + PW > 0:
            up = (row[:, None] + kh[None, :]).to(tl.uint32)
            left = (col[:, None] + kw[None, :]).to(tl.uint32)
            ok = ok & (up < H) & (left < W)
        at = x + (image * (C * H * W) + row * W + col)[:, None] + offset[None, :]
        source = tl.load(at, mask=ok, other=0.0)
        if SWAP:
            acc = tl.dot(tl.trans(source), g, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(tl.trans(g), source, acc, input_precision=PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    partial += (client * SPLITS + split) * SIZE
    tl.store(partial + o[:, None] * K + k[None, :], acc, mask=(o < O)[:, None] & (k < K)[None, :])


@triton.jit
def reduce_kernel(
    partial, weight,
    C: tl.constexpr, O: tl.constexpr, TAPS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the shares up, and puts the weights back into (o, c, kh, kw)."""
    K: tl.constexpr = TAPS * C
    SIZE: tl.constexpr = O * K
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    client = (tl.program_id(0) // BLOCKS).to(tl.int64)
    j = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inner = j % K
    source = j // K * K + inner % TAPS * C + inner // TAPS
    share = tl.arange(0, SPLITS) * SIZE
    at = partial + client * (SPLITS * SIZE) + source[None, :] + share[:, None]
    total = tl.sum(tl.load(at, mask=(j < SIZE)[None, :], other=0.0), axis=0)
    tl.store(weight + client * (O * K) + j, total, mask=j < O * K)


@triton.jit
def bias_kernel(
    grad, partial, grad_stride, images, share,
    O: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BI: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The bias's gradient over one share of the images: a program sums one channel's places."""
    o = tl.program_id(0) % O
    split = tl.program_id(0) // O % SPLITS
    client = (tl.program_id(0) // (O * SPLITS)).to(tl.int64)
    source = grad + client * grad_stride + o * SIZE
    i = tl.arange(0, BI)
    s = tl.arange(0, BS)
    start = split * share
    end = tl.minimum(start + share, images)
    total = tl.zeros([BI, BS], dtype=tl.float32)
    for first in range(start, end, BI):
        image = first + i
        for place in range(0, SIZE, BS):
            known = (image < end)[:, None] & (place + s < SIZE)[None, :]
            total += tl.load(source + image[:, None] * (O * SIZE) + (place + s)[None, :], mask=known, other=0.0)
    tl.store(partial + (client * SPLITS + split) * O + o, tl.sum(tl.sum(total, axis=1), axis=0))
