"""Rounding: a message as it travels, and as its receiver reads it. Pure functions of tensors, for one client or many.

Going down, numbers are rounded to the nearest. Going up, differences from the packet are rounded at random to one of
the two neighbours, such that the mean is exact. Whole numbers have one scale per unit, max |x| / levels.

    client   d = φ − packet            sends Q(d),   its assignment is packet + Q(d)
    server   has w, packet = Q(w)      reads w + Q(d)

The server adds the difference to its own w. If it added it to Q(w), changes smaller than half a step of the packet's
rounding would be lost in every round.
"""

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.trees import Params, Tree
from fedprior.wire.layout import Layout, Section
from fedprior.wire.precision import Format, format_of

SCALES = ".scales"
"""The suffix that names the section of a section's scales."""


def quantise(message: Tree, layout: Layout, reference: Tree | None = None, key: Tensor | None = None) -> Tree:
    """Round a message to codes and their scales, with zeros where gates leave nothing.

    With a `reference`, code differences from its tensors of the same name. With a `key`, round at random.
    """
    if layout.precision is None:
        return message
    gates = message.get("gates", {})
    coded: Tree = {"gates": gates} if layout.gates else {}
    for place, (name, section) in enumerate(layout.sections.items()):
        if name not in message:
            continue
        masks = section.mask(gates) if section.mask else {}
        values = {}
        for tensor in section.shapes:
            value, base = message[name][tensor], _base(reference, layout, name, tensor)
            value = value if base is None else value - base
            values[tensor] = torch.where(masks[tensor] > 0, value, 0.0) if tensor in masks else value
        written, own = format_of(layout, name), None if key is None else keys.fold(key, place)
        if written.levels:
            coded[name], coded[name + SCALES] = _whole(values, section, written.levels, own)
        else:
            own_keys = [None if own is None else keys.fold(own, i) for i in range(len(values))]
            rounded = zip(values.items(), own_keys, strict=True)
            coded[name] = {tensor: _floating(value, written, draw) for (tensor, value), draw in rounded}
    return coded


def restore(coded: Tree, layout: Layout, reference: Tree | None = None) -> Tree:
    """The message as its receiver reads it; what was not sent is zero."""
    if layout.precision is None:
        return coded
    gates = {name: gate for name, gate in coded.get("gates", {}).items() if name not in layout.marks}
    message: Tree = {"gates": gates} if len(layout.gates) > len(layout.marks) else {}
    for name, section in layout.sections.items():
        written, message[name] = format_of(layout, name), {}
        # Codes are zero where nothing was sent, but the base that they are added to is not.
        left = section.support or section.mask
        masks = left(gates) if left and reference and section.relative else {}
        for tensor, code in coded[name].items():
            scales = coded[name + SCALES] if written.levels else None
            value = code * scales[tensor] if scales else code.to(layout.dtype)
            base = _base(reference, layout, name, tensor)
            if base is not None:
                value = base + value
                value = torch.where(masks[tensor] > 0, value, 0.0) if tensor in masks else value
            message[name][tensor] = value
    return message


def _base(reference: Tree | None, layout: Layout, name: str, tensor: str) -> Tensor | None:
    """The base of a tensor sent as a difference: the packet's tensor, or the mean of its models if it has several."""
    section = layout.sections[name]
    found = (reference or {}).get(name, {}).get(tensor) if section.relative else None
    if found is None or tuple(found.shape) == section.shapes[tensor]:
        return found
    return found.mean(0) if tuple(found.shape[1:]) == section.shapes[tensor] else None


def _whole(values: Params, section: Section, levels: int, key: Tensor | None) -> tuple[Params, Params]:
    """Codes from −levels to levels and their scales, max |x| / levels per unit."""
    shapes = {tensor: section.scale_shape(tuple(value.shape)) for tensor, value in values.items()}
    largest = [
        _largest(value, shape).reshape(-1) for value, shape in zip(values.values(), shapes.values(), strict=True)
    ]
    if section.negligible:
        largest = [_notable(each, section.negligible) for each in largest]
    # Join all tensors, here and below: arithmetic on one long vector is faster than on many short ones.
    joint = torch.cat(largest) / levels
    # Below this, numbers lose digits. A scale of zero says that the unit has not moved.
    joint = torch.where(joint < torch.finfo(joint.dtype).tiny, 0.0, joint)
    # An infinite step gives code zero, rounded at random or not, to whatever is left of a unit with scale zero.
    scales, steps = _part(joint, shapes), _part(torch.where(joint > 0, joint, torch.inf), shapes)
    ratio = torch.cat([(value / steps[tensor]).reshape(-1) for tensor, value in values.items()])
    codes = _round(ratio, key).clamp(-levels, levels).to(torch.int8)
    return _part(codes, {tensor: tuple(value.shape) for tensor, value in values.items()}), scales


def _largest(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """max |x| over the dimensions that share a scale."""
    if value.numel() == 0:
        return value.new_zeros(shape)
    dims = [dim for dim, size in enumerate(shape) if size != value.shape[dim]]
    return value.abs().amax(dims, keepdim=True) if dims else value.abs()


def _notable(largest: Tensor, share: float) -> Tensor:
    """Set to zero the units of a tensor that are below a share of its largest."""
    return torch.where(largest < share * largest.amax(), 0.0, largest) if largest.numel() else largest


def _round(ratio: Tensor, key: Tensor | None) -> Tensor:
    """Round to the nearest whole number or, with a key, to one of its two neighbours such that the mean is exact."""
    if key is None:
        return ratio.round()
    below = ratio.floor()
    return below + (keys.uniform(key, tuple(ratio.shape), ratio.dtype) < ratio - below)


def _floating(value: Tensor, written: Format, key: Tensor | None) -> Tensor:
    """Round to a floating-point number with fewer digits."""
    if written.dtype is None or key is None:
        return value if written.dtype is None else value.to(written.dtype)
    exponent = torch.frexp(value).exponent.clamp(min=written.lowest)
    step = torch.ldexp(torch.ones_like(value), exponent - written.digits)
    return (_round(value / step, key) * step).to(written.dtype)


def _part(joint: Tensor, shapes: dict[str, tuple[int, ...]]) -> Params:
    """Split one vector into tensors."""
    pieces = joint.split([torch.Size(shape).numel() for shape in shapes.values()])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
