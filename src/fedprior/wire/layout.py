"""What a message in one direction holds. Both ends derive it from the model, so it is never sent."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fedprior.core.trees import Gates, Params


@dataclass(frozen=True)
class Section:
    """A dictionary of tensors in a message. With a mask, only what the message's own gates leave is sent."""

    shapes: dict[str, tuple[int, ...]]
    mask: Callable[[Gates], Params] | None = None
    support: Callable[[Gates], Params] | None = None
    """What is part of the network, if less of that is sent: the rest is as in the packet. None if all of it is sent."""
    relative: bool = True
    """Whether an upload can send its numbers as differences from those of the same name in the packet."""
    precision: str | None = None
    """The precision of this section in rounded messages, if it differs from the others'."""
    models: int = 0
    """How many leading dimensions count models, not units: a mixture's packet has one."""
    negligible: float = 0.0
    """In whole numbers, a unit with all numbers below this share of its tensor's largest is sent as zeros."""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a rounded tensor's scales: one per unit (row), or one in all if it has at most one dimension.

        >>> Section({}).scale_shape((8, 3, 5, 5)), Section({}).scale_shape((8,))
        ((8, 1, 1, 1), (1,))
        """
        kept = self.models + (len(shape) > self.models + 1)
        return (*shape[:kept], *[1] * (len(shape) - kept))


@dataclass(frozen=True)
class Layout:
    """One direction's messages: a bitmap of gates, then the sections in order."""

    sections: dict[str, Section]
    gates: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    direction: str = ""
    """`down` or `up`: part of the fingerprint, because a dense model looks the same both ways."""
    wiring: str = ""
    """Which entries a gate removes, as text: part of the fingerprint as well."""
    precision: str | None = None
    """What numbers are rounded to (`float16`, `bfloat16`, `int8`, `int4`); in an upload, `float32` means differences
    without rounding. If None, numbers are sent as they are."""
    marks: tuple[str, ...] = ()
    """Gates that only say what travels; their receiver does not keep them."""
    masked: bool = False
    """Whether gates use a code of their own when that is shorter than one bit each."""
    entropy: bool = False
    """Whether whole numbers use a code of variable length when that makes a message shorter."""

    @cached_property
    def fingerprint(self) -> bytes:
        """Eight bytes that depend on the model's structure, the sections, the direction and the precision."""
        text = [
            self.direction,
            self.wiring,
            str(self.dtype),
            *(f"gate {name} {shape}" for name, shape in self.gates.items()),
        ]
        for name, section in self.sections.items():
            text += [f"{name}/{key} {shape} {section.mask is not None}" for key, shape in section.shapes.items()]
        if self.masked:
            text.append("masked")
        if self.precision is not None:
            text.append(f"precision {self.precision}")
            text += [f"{name} {s.relative} {s.precision} {s.models}" for name, s in self.sections.items()]
        return hashlib.sha256("\n".join(text).encode()).digest()[:8]

    @cached_property
    def gate_count(self) -> int:
        """How many bits the bitmap has."""
        return sum(torch.Size(shape).numel() for shape in self.gates.values())
