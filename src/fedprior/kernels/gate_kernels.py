"""Triton code of gates: one program per client and group of weights, or one lane per gate."""

import triton
import triton.language as tl

from fedprior.kernels.draw_kernels import draw, lanes


@triton.jit
def norm_kernel(w, norms, w_stride, units, first, gates, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """‖w_g‖₂ of every row of `w`."""
    unit = (tl.program_id(0) % units).to(tl.int64)
    client = (tl.program_id(0) // units).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(w + client * w_stride + unit * WIDTH + i, mask=i < WIDTH, other=0.0)
        squares += value * value
    tl.store(norms + client * gates + first + unit, tl.sqrt(tl.sum(squares, axis=0)))


@triton.jit
def scale_kernel(
    w, a, b, z, out_w, out_a, out_b, w_stride, a_stride, b_stride, units, first, gates,
    WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiplies each group by its gate."""
    unit = (tl.program_id(0) % units).to(tl.int64)
    client = (tl.program_id(0) // units).to(tl.int64)
    gate = tl.load(z + client * gates + first + unit)
    row = client * units + unit
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(w + client * w_stride + unit * WIDTH + i, mask=i < WIDTH, other=0.0)
        tl.store(out_w + row * WIDTH + i, value * gate, mask=i < WIDTH)
    if A:
        tl.store(out_a + row, tl.load(a + client * a_stride + unit) * gate)
    if B:
        tl.store(out_b + row, tl.load(b + client * b_stride + unit) * gate)


@triton.jit
def scale_backward_kernel(
    grad_w, grad_a, grad_b, w, a, b, z, dw, da, db, dz,
    grad_w_stride, grad_a_stride, grad_b_stride, w_stride, a_stride, b_stride, units, first, gates,
    WIDTH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights and of the gate, in one pass over both."""
    unit = (tl.program_id(0) % units).to(tl.int64)
    client = (tl.program_id(0) // units).to(tl.int64)
    gate = tl.load(z + client * gates + first + unit)
    row = client * units + unit
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        g = tl.load(grad_w + client * grad_w_stride + unit * WIDTH + i, mask=i < WIDTH, other=0.0)
        value = tl.load(w + client * w_stride + unit * WIDTH + i, mask=i < WIDTH, other=0.0)
        tl.store(dw + row * WIDTH + i, g * gate, mask=i < WIDTH)
        products += g * value
    total = tl.sum(products, axis=0)
    if A:
        g = tl.load(grad_a + client * grad_a_stride + unit)
        total += g * tl.load(a + client * a_stride + unit)
        tl.store(da + row, g * gate)
    if B:
        g = tl.load(grad_b + client * grad_b_stride + unit)
        total += g * tl.load(b + client * b_stride + unit)
        tl.store(db + row, g * gate)
    tl.store(dz + client * gates + first + unit, total)


@triton.jit
def logit_kernel(
    norms, v, is_open, temperature, number, logits, gates, count, edge, opened, closed,
    EACH: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(‖w_g‖ − softplus(v)) / T and its sigmoid; v below the edge has no threshold, a closed gate stays closed."""
    row, i = lanes(count, BLOCK)
    inside = i < count
    at = row * count + i
    threshold = tl.load(v + at, mask=inside, other=0.0)
    e = tl.exp(tl.minimum(threshold, 20.0))
    up = 1.0 + e
    # log(1 + e) without losing a small e to rounding (Kahan), and v itself where e is large, as torch does.
    plus = tl.where(up == 1.0, e, tl.log(up) * (e / tl.where(up == 1.0, 1.0, up - 1.0)))
    plus = tl.where(threshold > 20.0, threshold, plus)
    if EACH:  # one temperature per row, rather than one for all
        number = tl.load(temperature + row)
    logit = (tl.load(norms + at, mask=inside, other=0.0) - plus) / number
    logit = tl.where(threshold < edge, opened, logit)
    if MASK:
        logit = tl.where(tl.load(is_open + at, mask=inside, other=0) != 0, logit, closed)
    tl.store(logits + at, logit, mask=inside)
    tl.store(gates + at, tl.sigmoid(logit), mask=inside)


@triton.jit
def logit_backward_kernel(
    grad_logits, grad_gates, v, gates, is_open, temperature, number, dv, count, edge,
    EACH: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of v; norms have none, because thresholds decide."""
    row, i = lanes(count, BLOCK)
    inside = i < count
    at = row * count + i
    gate = tl.load(gates + at, mask=inside, other=0.0)
    slope = tl.load(grad_logits + at, mask=inside, other=0.0)
    slope += tl.load(grad_gates + at, mask=inside, other=0.0) * gate * (1.0 - gate)
    threshold = tl.load(v + at, mask=inside, other=0.0)
    if EACH:
        number = tl.load(temperature + row)
    slope = -slope / number * tl.sigmoid(threshold)
    slope = tl.where(threshold < edge, 0.0, slope)
    if MASK:
        slope = tl.where(tl.load(is_open + at, mask=inside, other=0) != 0, slope, 0.0)
    tl.store(dv + at, slope, mask=inside)


@triton.jit
def _stretched(logits, keys, row, i, count, shift, BETA: tl.constexpr):
    """A concrete draw between 0 and 1, before it is stretched."""
    u = draw(keys, row, i)
    logit = tl.load(logits + row * count + i, mask=i < count, other=0.0)
    return tl.sigmoid((tl.log(u / (1.0 - u)) + logit) / BETA + shift)


@triton.jit
def concrete_kernel(
    logits, keys, out, count, shift, BETA: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """A hard-concrete draw from each gate's logit, one key per row."""
    row, i = lanes(count, BLOCK)
    value = _stretched(logits, keys, row, i, count, shift, BETA) * (HIGH - LOW) + LOW
    value = tl.where(value < 0.0, 0.0, tl.where(value > 1.0, 1.0, value))
    tl.store(out + row * count + i, value, mask=i < count)


@triton.jit
def concrete_backward_kernel(
    grad, logits, keys, out, count, shift, BETA: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The logit's gradient, with the same draw."""
    row, i = lanes(count, BLOCK)
    s = _stretched(logits, keys, row, i, count, shift, BETA)
    value = s * (HIGH - LOW) + LOW
    g = tl.load(grad + row * count + i, mask=i < count, other=0.0)
    slope = g * ((HIGH - LOW) / BETA) * s * (1.0 - s)
    tl.store(out + row * count + i, tl.where((value >= 0.0) & (value <= 1.0), slope, 0.0), mask=i < count)
