"""A network's inputs: one tensor or, for a module whose `forward` has several parameters, several by their names.

Several inputs are chosen by rows, moved and joined as one tensor is, so whoever handles examples need not know.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Several:
    """Several tensors by name, with one row for each example; or, as a network's example, one row of each."""

    parts: Mapping[str, Tensor]

    def __repr__(self) -> str:
        """Show shapes rather than the inputs themselves."""
        return f"Several({', '.join(f'{name} {tuple(part.shape)}' for name, part in self.parts.items())})"

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def __getitem__(self, rows: int | slice | Tensor) -> "Several":
        return self._each(lambda part: part[rows])

    def to(self, device: torch.device | str) -> "Several":
        """All of them on a device."""
        return self._each(lambda part: part.to(device))

    def cpu(self) -> "Several":
        """All of them on the host."""
        return self.to("cpu")

    def unsqueeze(self, dim: int) -> "Several":
        """All of them with another dimension."""
        return self._each(lambda part: part.unsqueeze(dim))

    def split(self, size: int) -> list["Several"]:
        """So many rows at a time."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Several":
        return Several({name: change(part) for name, part in self.parts.items()})


ModelInputs = Tensor | Several


def as_inputs(given: Any) -> Any:
    """A dictionary of tensors as several inputs; anything else unchanged."""
    named = isinstance(given, Mapping) and given and all(isinstance(part, Tensor) for part in given.values())
    return Several({str(name): part for name, part in given.items()}) if named else given


def tensors(inputs: ModelInputs) -> list[Tensor]:
    """The tensors that there are."""
    return list(inputs.parts.values()) if isinstance(inputs, Several) else [inputs]


def plain(inputs: ModelInputs) -> Tensor | dict[str, Tensor]:
    """A tensor or a dictionary of them, which is what `vmap` can take apart."""
    return dict(inputs.parts) if isinstance(inputs, Several) else inputs


def joined(parts: Sequence[ModelInputs]) -> ModelInputs:
    """All rows of some inputs, one after another."""
    first = parts[0]
    if not isinstance(first, Several):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    named = [part.parts for part in parts if isinstance(part, Several)]
    return Several({name: torch.cat([part[name] for part in named]) for name in first.parts})


def real_type(inputs: ModelInputs) -> torch.dtype:
    """The type of the first input that is a real number; single precision if none is."""
    return next((part.dtype for part in tensors(inputs) if part.is_floating_point()), torch.float32)
