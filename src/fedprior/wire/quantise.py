"""Rounding: a message as it travels, and as it is understood. Pure functions of tensors, for one client or many.

Going down, numbers are rounded to the nearest. Going up, differences to the packet are rounded at random, to one of the
two neighbours with such probabilities that the mean is exact. Whole numbers have a scale a unit, max |x| / levels.

    client   d = φ − packet            sends Q(d),   its assignment is packet + Q(d)
    server   has w, packet = Q(w)      reads w + Q(d)

The server adds the difference to its own w. Added to Q(w), a change smaller than half a step of the way down would be
rounded away in every round.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprior import keys
from fedprior.trees import Tree
from fedprior.wire.layout import Layout
from fedprior.wire.precision import Format, format_of

SCALES = ".scales"
"""What the section of a section's scales is called."""


def quantise(message: Tree, layout: Layout, reference: Tree | None = None, key: Tensor | None = None) -> Tree:
    """A message as it travels: codes and their scales, zero where gates leave nothing.

    With a `reference`, differences to what it has under the same name; with a `key`, rounded at random.
    """
    if layout.precision is None:
        return message
    gates = message.get("gates", {})
    coded: Tree = {"gates": gates} if layout.gates else {}
    draws = _draws(message, layout, key)
    for name, section in layout.sections.items():
        if name not in message:
            continue
        written, masks = format_of(layout, name), section.mask(gates) if section.mask else {}
        codes, scales = {}, {}
        for tensor, shape in section.shapes.items():
            value, base = message[name][tensor], _base(reference, layout, name, tensor)
            value = value if base is None else value - base
            if tensor in masks:
                value = torch.where(masks[tensor] > 0, value, 0.0)
            step = _step(value, written, section.scale_shape(shape), random=key is not None)
            codes[tensor] = _round(value, step, written, next(draws))
            if written.levels and step is not None:
                scales[tensor] = step
        coded |= {name: codes, name + SCALES: scales} if written.levels else {name: codes}
    return coded


def restore(coded: Tree, layout: Layout, reference: Tree | None = None) -> Tree:
    """The message that a receiver understands; what was not sent is zero."""
    if layout.precision is None:
        return coded
    gates = coded.get("gates", {})
    message: Tree = {"gates": gates} if layout.gates else {}
    for name, section in layout.sections.items():
        written, masks = format_of(layout, name), section.mask(gates) if section.mask else {}
        message[name] = {}
        for tensor, code in coded[name].items():
            value = code.to(layout.dtype)
            if written.levels:
                value = value * coded[name + SCALES][tensor]
            base = _base(reference, layout, name, tensor)
            if base is not None:
                value = base + value
                value = torch.where(masks[tensor] > 0, value, 0.0) if tensor in masks else value
            message[name][tensor] = value
    return message


def _base(reference: Tree | None, layout: Layout, name: str, tensor: str) -> Tensor | None:
    """What a tensor is sent as a difference to: the packet's, or of a packet with several models their mean."""
    section = layout.sections[name]
    found = (reference or {}).get(name, {}).get(tensor) if section.relative else None
    if found is None or tuple(found.shape) == section.shapes[tensor]:
        return found
    return found.mean(0) if tuple(found.shape[1:]) == section.shapes[tensor] else None


def _step(value: Tensor, written: Format, shape: tuple[int, ...], random: bool) -> Tensor | None:
    """The distance between neighbours: of whole numbers one a unit; None where the cast itself rounds well enough."""
    if written.levels:
        dims = [dim for dim, size in enumerate(shape) if size != value.shape[dim]]
        largest = value.abs()
        if value.numel() == 0:
            return value.new_zeros(shape)
        step = (largest.amax(dims, keepdim=True) if dims else largest) / written.levels
        # Numbers without all their digits: a scale of zero says that the unit has not moved.
        return torch.where(step < torch.finfo(value.dtype).tiny, 0.0, step)
    if not written.digits or not random:
        return None
    exponent = torch.frexp(value.detach()).exponent
    return torch.ldexp(torch.ones_like(value), exponent.clamp(min=written.lowest) - written.digits)


def _round(value: Tensor, step: Tensor | None, written: Format, draw: Tensor | None) -> Tensor:
    """The code of every number; of a floating-point format, that is the rounded number."""
    if step is not None:
        ratio = value / torch.where(step > 0, step, 1.0)
        if draw is None:
            ratio = ratio.round()
        else:
            below = ratio.floor()
            ratio = below + (draw < ratio - below)
        value = ratio.clamp(-written.levels, written.levels) if written.levels else ratio * step
    return value if written.dtype is None else value.to(written.dtype)


def _draws(message: Tree, layout: Layout, key: Tensor | None) -> Iterator[Tensor | None]:
    """Uniform numbers for every tensor that is to be rounded, from one long draw."""
    shapes = [
        shape if key is not None and format_of(layout, name).dtype is not None else None
        for name, section in layout.sections.items()
        if name in message
        for shape in section.shapes.values()
    ]
    sizes = [torch.Size(shape).numel() if shape is not None else 0 for shape in shapes]
    if key is None or not sum(sizes):
        return iter([None] * len(shapes))
    pieces = keys.uniform(key, (sum(sizes),), layout.dtype).split(sizes)
    return iter([None if s is None else piece.reshape(s) for s, piece in zip(shapes, pieces, strict=True)])
