"""How precisely numbers travel: the formats, and which of them each direction uses."""

from dataclasses import dataclass, replace

import torch

from fedprior.core.choices import directions
from fedprior.wire.layout import Layout


@dataclass(frozen=True)
class Format:
    """One way to write a number."""

    code: int
    """Its number in a message's header."""
    dtype: torch.dtype | None = None
    """The type of the numbers in memory; None for the model's own."""
    bits: int = 0
    """The width on the wire, if it differs from the dtype's size."""
    levels: int = 0
    """Whole numbers run from −levels to levels, times a scale that is sent once per unit; 0 if not whole."""
    digits: int = 0
    """The binary digits of a floating-point number, including the hidden one."""
    lowest: int = 0
    """The exponent (of a fraction between ½ and 1) below which digits are lost."""

    def width(self, own: torch.dtype) -> int:
        """Bits per number."""
        return self.bits or 8 * (self.dtype or own).itemsize


FULL = Format(0)
FORMATS = {
    "float32": FULL,
    "float16": Format(2, torch.float16, digits=11, lowest=-13),
    # bfloat16 goes as low as float32; steps below the smallest normal float32 are useless.
    "bfloat16": Format(3, torch.bfloat16, digits=8, lowest=-118),
    "int8": Format(4, torch.int8, levels=127),
    "int4": Format(5, torch.int8, bits=4, levels=7),
}


@dataclass(frozen=True)
class Wire:
    """The precision of each direction. With the defaults nothing is rounded."""

    down: str = "float32"
    up: str = "float32"
    entropy: bool = True
    """Whether whole numbers use a code of variable length when that makes a message shorter."""

    @classmethod
    def of(cls, text: str, entropy: bool = True) -> "Wire":
        """Read `int4`, for both directions, or `int8/int4`, for down and up.

        >>> Wire.of("int8/int4").up
        'int4'
        """
        return cls(*directions(text), entropy)

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded."""
        return (self.down, self.up) != ("float32", "float32")

    def layout(self, layout: Layout) -> Layout:
        """A layout with the precision of its direction.

        If packets are rounded, uploads are differences, whatever their own precision. Only then can the server add
        them to weights that it did not round. So are uploads that hold only a part of what changed.
        """
        if layout.direction == "down":
            precision = None if self.down == "float32" else self.down
        else:
            precision = self.up if self.rounds or layout.marks else None
        return replace(layout, precision=precision, entropy=self.entropy) if precision else layout


def format_of(layout: Layout, section: str) -> Format:
    """How a section's numbers are written."""
    if layout.precision in (None, "float32"):
        return FULL
    return FORMATS[layout.sections[section].precision or str(layout.precision)]
