"""What a message of one direction holds. Both ends derive it from the model, so it never travels."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fedprior.trees import Gates, Params


@dataclass(frozen=True)
class Section:
    """A dictionary of tensors in a message; with a mask, only what the message's own gates leave is sent."""

    shapes: dict[str, tuple[int, ...]]
    mask: Callable[[Gates], Params] | None = None


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

    @cached_property
    def fingerprint(self) -> bytes:
        """Eight bytes that differ when the model's structure, the algorithm's sections or the direction differ."""
        text = [
            self.direction,
            self.wiring,
            str(self.dtype),
            *(f"gate {name} {shape}" for name, shape in self.gates.items()),
        ]
        for name, section in self.sections.items():
            text += [f"{name}/{key} {shape} {section.mask is not None}" for key, shape in section.shapes.items()]
        return hashlib.sha256("\n".join(text).encode()).digest()[:8]

    @cached_property
    def gate_count(self) -> int:
        """How many bits the bitmap has."""
        return sum(torch.Size(shape).numel() for shape in self.gates.values())
