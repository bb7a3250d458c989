"""What a client's training is fed: one batch a step."""

from typing import NamedTuple, Protocol

from torch import Tensor

from fedprior.core.trees import Params


class Batch(NamedTuple):
    """One step's examples. Weights are 1, or 0 for padding; none at all means no padding."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    active: Tensor | None
    """Whether the client still trains; None: it does."""


class Batches(Protocol):
    """A sequence of batches, which may be made as they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, step: int, /) -> Batch: ...


def given(batch: Batch) -> Params:
    """A batch as tensors only, which is what `vmap` takes: without padding there are no weights."""
    weight = {} if batch.weight is None else {"weight": batch.weight}
    return {"x": batch.x, "y": batch.y, **weight}
