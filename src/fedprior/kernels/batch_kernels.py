"""Triton code of the batched batch norm: one program reads one channel of one client, over all its images."""

import triton
import triton.language as tl


@triton.jit
def batch_kernel(
    x, mask, weight, bias, out, means, variances, x_stride, mask_stride, weight_stride, bias_stride, images, eps,
    C: tl.constexpr, SIZE: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr, BI: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    """Normalises by the statistics of the images that are not masked, and keeps these statistics."""
    channel = tl.program_id(0) % C
    client = (tl.program_id(0) // C).to(tl.int64)
    source = x + client * x_stride + channel * SIZE
    i = tl.arange(0, BI)
    s = tl.arange(0, BS)
    total = tl.zeros([BI, BS], dtype=tl.float32)
    seen = tl.zeros([BI], dtype=tl.float32)
    for first in range(0, images, BI):
        image = first + i
        if MASKED:
            real = tl.load(mask + client * mask_stride + image, mask=image < images, other=0.0)
        else:
            real = (image < images).to(tl.float32)
        seen += real
        for start in range(0, SIZE, BS):
            known = (image < images)[:, None] & (start + s < SIZE)[None, :]
            value = tl.load(source + image[:, None] * (C * SIZE) + (start + s)[None, :], mask=known, other=0.0)
            total += value * real[:, None]
    count = tl.maximum(tl.sum(seen, axis=0) * SIZE, 1.0)
    mean = tl.sum(tl.sum(total, axis=1), axis=0) / count
    total = tl.zeros([BI, BS], dtype=tl.float32)
    for first in range(0, images, BI):
        image = first + i
        if MASKED:
            real = tl.load(mask + client * mask_stride + image, mask=image < images, other=0.0)
        else:
            real = (image < images).to(tl.float32)
        for start in range(0, SIZE, BS):
            known = (image < images)[:, None] & (start + s < SIZE)[None, :]
            value = tl.load(source + image[:, None] * (C * SIZE) + (start + s)[None, :], mask=known, other=0.0)
            centred = tl.where(known, value - mean, 0.0)
            total += centred * centred * real[:, None]
    variance = tl.sum(tl.sum(total, axis=1), axis=0) / count
    scale = 1.0 / tl.sqrt(variance + eps)
    shift = 0.0
    if AFFINE:
        scale = scale * tl.load(weight + client * weight_stride + channel)
        shift = tl.load(bias + client * bias_stride + channel)
    target = out + client * images * (C * SIZE) + channel * SIZE
    for first in range(0, images, BI):
        image = first + i
        for start in range(0, SIZE, BS):
            known = (image < images)[:, None] & (start + s < SIZE)[None, :]
            at = image[:, None] * (C * SIZE) + (start + s)[None, :]
            value = tl.load(source + at, mask=known, other=0.0)
            tl.store(target + at, (value - mean) * scale + shift, mask=known)
    tl.store(means + client * C + channel, mean)
    tl.store(variances + client * C + channel, variance)


@triton.jit
def batch_backward_kernel(
    grad, x, mask, weight, means, variances, dx, sums, grad_stride, x_stride, mask_stride, weight_stride, images,
    clients, eps,
    C: tl.constexpr, SIZE: tl.constexpr, AFFINE: tl.constexpr, MASKED: tl.constexpr, BI: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    """The gradients of the input, the weight and the bias."""
    channel = tl.program_id(0) % C
    client = (tl.program_id(0) // C).to(tl.int64)
    source = x + client * x_stride + channel * SIZE
    slope = grad + client * grad_stride + channel * SIZE
    mean = tl.load(means + client * C + channel)
    scale = 1.0 / tl.sqrt(tl.load(variances + client * C + channel) + eps)
    i = tl.arange(0, BI)
    s = tl.arange(0, BS)
    along = tl.zeros([BI, BS], dtype=tl.float32)
    plain = tl.zeros([BI, BS], dtype=tl.float32)
    seen = tl.zeros([BI], dtype=tl.float32)
    for first in range(0, images, BI):
        image = first + i
        if MASKED:
            seen += tl.load(mask + client * mask_stride + image, mask=image < images, other=0.0)
        else:
            seen += (image < images).to(tl.float32)
        for start in range(0, SIZE, BS):
            known = (image < images)[:, None] & (start + s < SIZE)[None, :]
            at = image[:, None] * (C * SIZE) + (start + s)[None, :]
            g = tl.load(slope + at, mask=known, other=0.0)
            value = tl.load(source + at, mask=known, other=0.0)
            plain += g
            along += g * (value - mean) * scale
    count = tl.maximum(tl.sum(seen, axis=0) * SIZE, 1.0)
    along_sum = tl.sum(tl.sum(along, axis=1), axis=0)
    plain_sum = tl.sum(tl.sum(plain, axis=1), axis=0)
    size = scale
    if AFFINE:
        tl.store(sums + client * C + channel, along_sum)
        tl.store(sums + (clients + client) * C + channel, plain_sum)
        size = scale * tl.load(weight + client * weight_stride + channel)
    target = dx + client * images * (C * SIZE) + channel * SIZE
    for first in range(0, images, BI):
        image = first + i
        if MASKED:
            real = tl.load(mask + client * mask_stride + image, mask=image < images, other=0.0)
        else:
            real = (image < images).to(tl.float32)
        share = real / count
        for start in range(0, SIZE, BS):
            known = (image < images)[:, None] & (start + s < SIZE)[None, :]
            at = image[:, None] * (C * SIZE) + (start + s)[None, :]
            g = tl.load(slope + at, mask=known, other=0.0)
            value = tl.load(source + at, mask=known, other=0.0)
            normal = (value - mean) * scale
            tl.store(target + at, (g - share[:, None] * (plain_sum + normal * along_sum)) * size, mask=known)
