"""The parts of a message, tensor by tensor: which entries travel, how they are written, how many bytes they take."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedprior.core.trees import Gates, Tree
from fedprior.wire.layout import Layout
from fedprior.wire.precision import FULL, Format, format_of
from fedprior.wire.quantise import SCALES


@dataclass(frozen=True)
class Part:
    """One tensor of a message."""

    section: str
    name: str
    shape: tuple[int, ...]
    mask: Tensor | None
    """Which entries travel, broadcastable to the shape; None if all do."""
    written: Format

    @cached_property
    def count(self) -> Tensor | int:
        """How many entries travel, without expanding the mask."""
        size = torch.Size(self.shape).numel()
        return size if self.mask is None else self.mask.sum() * (size // max(self.mask.numel(), 1))


def parts_of(layout: Layout, gates: Gates) -> Iterator[Part]:
    """Everything that travels besides the bitmap, in order."""
    for name, section in layout.sections.items():
        written = format_of(layout, name)
        masks = {key: mask > 0 for key, mask in section.mask(gates).items()} if section.mask else {}
        if written.levels:
            for key, shape in section.shapes.items():
                scales = section.scale_shape(shape)
                yield Part(name + SCALES, key, scales, _units(masks.get(key), scales, shape), FULL)
        for key, shape in section.shapes.items():
            yield Part(name, key, shape, masks.get(key), written)


def sections_of(layout: Layout) -> list[str]:
    """The sections of a message as it travels."""
    names = ["gates"] if layout.gates else []
    for name in layout.sections:
        names += [name, name + SCALES] if format_of(layout, name).levels else [name]
    return names


def _units(mask: Tensor | None, scales: tuple[int, ...], shape: tuple[int, ...]) -> Tensor | None:
    """Which units have an entry that travels."""
    if mask is None:
        return None
    dims = [dim for dim, size in enumerate(scales) if size != shape[dim] and mask.shape[dim] != size]
    return mask.sum(dims, keepdim=True) > 0 if dims else mask


def table_of(message: Tree, part: Part) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes as a table with one row per unit, the rows that are written (those with a scale), and the mask."""
    codes, scales = message[part.section][part.name], message[part.section + SCALES][part.name]
    table = (scales.numel(), codes.numel() // max(scales.numel(), 1))
    mask = None if part.mask is None else part.mask.expand(part.shape).reshape(table)
    return codes.reshape(table), scales.reshape(-1) > 0, mask


def size_of(count: Any, written: Format, layout: Layout) -> Any:
    """How many bytes `count` numbers of a format take at full width."""
    width = written.width(layout.dtype)
    return count * (width // 8) if width % 8 == 0 else (count * width + 7) // 8
