"""Triton code of gates: one program per client and group of weights, whatever its layer, or one lane per gate."""

import triton
import triton.language as tl

from fedprior.kernels.draw_kernels import draw, lanes


# One launch takes tensors of any layers: tensor t has a row for each of the gates BEGIN[t] to END[t].
@triton.jit
def _program(BEGIN: tl.constexpr, END: tl.constexpr):
    """This program's client and gate."""
    count = END[len(END) - 1] - BEGIN[0]
    return (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count + BEGIN[0]).to(tl.int64)


@triton.jit
def _row_norm(row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(row + i, mask=i < WIDTH, other=0.0)
        squares += value * value
    return tl.sqrt(tl.sum(squares, axis=0))


@triton.jit
def _scale_row(row, out, z, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(row + i, mask=i < WIDTH, other=0.0) * z, mask=i < WIDTH)


@triton.jit
def _row_backward(grad, row, out, z, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row's gradient; returns its share of the gate's."""
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        g = tl.load(grad + i, mask=i < WIDTH, other=0.0)
        tl.store(out + i, g * z, mask=i < WIDTH)
        products += g * tl.load(row + i, mask=i < WIDTH, other=0.0)
    return tl.sum(products, axis=0)


@triton.jit
def norm_kernel(
    weights, strides, norms, gates,
    BEGIN: tl.constexpr, END: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """‖w_g‖₂ of every row of every weight."""
    client, gate = _program(BEGIN, END)
    for t in tl.static_range(len(WIDTHS)):
        if (gate >= BEGIN[t]) & (gate < END[t]):
            row = weights[t] + client * strides[t] + (gate - BEGIN[t]) * WIDTHS[t]
            tl.store(norms + client * gates + gate, _row_norm(row, WIDTHS[t], BLOCKS[t]))


@triton.jit
def scale_kernel(
    tensors, out, strides, z, gates,
    BEGIN: tl.constexpr, END: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Multiplies each group by its gate."""
    client, gate = _program(BEGIN, END)
    factor = tl.load(z + client * gates + gate)
    for t in tl.static_range(len(WIDTHS)):
        if (gate >= BEGIN[t]) & (gate < END[t]):
            unit = gate - BEGIN[t]
            place = (client * (END[t] - BEGIN[t]) + unit) * WIDTHS[t]
            row = tensors[t] + client * strides[t] + unit * WIDTHS[t]
            _scale_row(row, out[t] + place, factor, WIDTHS[t], BLOCKS[t])


@triton.jit
def scale_backward_kernel(
    grads, tensors, out, grad_strides, strides, z, dz, gates,
    BEGIN: tl.constexpr, END: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Gradients of the groups and of their gates, in one pass over both."""
    client, gate = _program(BEGIN, END)
    factor = tl.load(z + client * gates + gate)
    total = 0.0
    for t in tl.static_range(len(WIDTHS)):
        if (gate >= BEGIN[t]) & (gate < END[t]):
            unit = gate - BEGIN[t]
            place = (client * (END[t] - BEGIN[t]) + unit) * WIDTHS[t]
            grad = grads[t] + client * grad_strides[t] + unit * WIDTHS[t]
            row = tensors[t] + client * strides[t] + unit * WIDTHS[t]
            total += _row_backward(grad, row, out[t] + place, factor, WIDTHS[t], BLOCKS[t])
    tl.store(dz + client * gates + gate, total)


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
