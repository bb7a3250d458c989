"""Triton code of the batched group norm: one program holds one group of one image in registers."""

import triton
import triton.language as tl


@triton.jit
def _place(images, GROUPS: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr):
    """This program's group, image and client, and the group's channels and places."""
    group = tl.program_id(0) % GROUPS
    image = tl.program_id(0) // GROUPS % images
    client = (tl.program_id(0) // GROUPS // images).to(tl.int64)
    return group, image, client, tl.arange(0, BC), tl.arange(0, BS)


@triton.jit
def norm_kernel(
    x, weight, bias, out, means, scales, x_stride, weight_stride, bias_stride, images, eps,
    C: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, AFFINE: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Normalises, and keeps each group's mean and inverse deviation."""
    EACH: tl.constexpr = C // GROUPS
    group, image, client, c, s = _place(images, GROUPS, BC, BS)
    known = (c < EACH)[:, None] & (s < SIZE)[None, :]
    at = (image * C + group * EACH) * SIZE + c[:, None] * SIZE + s[None, :]
    value = tl.load(x + client * x_stride + at, mask=known, other=0.0)
    mean = tl.sum(tl.sum(value, axis=1), axis=0) / (EACH * SIZE)
    centred = tl.where(known, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(tl.sum(centred * centred, axis=1), axis=0) / (EACH * SIZE) + eps)
    normal = centred * scale
    if AFFINE:
        channel = group * EACH + c
        w = tl.load(weight + client * weight_stride + channel, mask=c < EACH, other=0.0)
        b = tl.load(bias + client * bias_stride + channel, mask=c < EACH, other=0.0)
        normal = normal * w[:, None] + b[:, None]
    row = client * images + image
    tl.store(out + row * (C * SIZE) + (group * EACH * SIZE + c[:, None] * SIZE + s[None, :]), normal, mask=known)
    tl.store(means + row * GROUPS + group, mean)
    tl.store(scales + row * GROUPS + group, scale)


@triton.jit
def norm_backward_kernel(
    grad, x, weight, means, scales, dx, sums, grad_stride, x_stride, weight_stride, images,
    C: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, AFFINE: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The input's gradient, and each image's share of the weight's and the bias's."""
    EACH: tl.constexpr = C // GROUPS
    group, image, client, c, s = _place(images, GROUPS, BC, BS)
    known = (c < EACH)[:, None] & (s < SIZE)[None, :]
    at = (image * C + group * EACH) * SIZE + c[:, None] * SIZE + s[None, :]
    row = client * images + image
    mean = tl.load(means + row * GROUPS + group)
    scale = tl.load(scales + row * GROUPS + group)
    g = tl.load(grad + client * grad_stride + at, mask=known, other=0.0)
    value = tl.load(x + client * x_stride + at, mask=known, other=0.0)
    normal = tl.where(known, (value - mean) * scale, 0.0)
    along = tl.sum(g * normal, axis=1)
    plain = tl.sum(g, axis=1)
    if AFFINE:
        channel = group * EACH + c
        w = tl.load(weight + client * weight_stride + channel, mask=c < EACH, other=0.0)
        tl.store(sums + row * C + channel, along, mask=c < EACH)
        half = (tl.num_programs(0) // GROUPS).to(tl.int64) * C
        tl.store(sums + half + row * C + channel, plain, mask=c < EACH)
        g = g * w[:, None]
        along = along * w
        plain = plain * w
    along_mean = tl.sum(along, axis=0) / (EACH * SIZE)
    plain_mean = tl.sum(plain, axis=0) / (EACH * SIZE)
    result = (g - plain_mean - normal * along_mean) * scale
    tl.store(dx + row * (C * SIZE) + (group * EACH * SIZE + c[:, None] * SIZE + s[None, :]), result, mask=known)
