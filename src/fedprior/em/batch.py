"""The input of a client's training: one batch per step."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedprior.core.inputs import ModelInputs, plain


class Batch(NamedTuple):
    """One step's examples. Weights are 1, or 0 for padding; without weights there is no padding."""

    x: ModelInputs
    y: Tensor
    weight: Tensor | None
    active: Tensor | None
    """Whether the client still trains; None if it does."""


class Batches(Protocol):
    """A sequence of batches, which may be made on demand."""

    def __len__(self) -> int: ...
    def __getitem__(self, step: int, /) -> Batch: ...


def given(batch: Batch) -> dict[str, Any]:
    """A batch as tensors only, as `vmap` requires: without padding there are no weights."""
    weight = {} if batch.weight is None else {"weight": batch.weight}
    return {"x": plain(batch.x), "y": batch.y, **weight}
