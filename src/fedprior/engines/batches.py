"""Which examples a client sees at each local step, the same with and without padding."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.federated import FederatedData
from fedprior.core.inputs import ModelInputs, real_type
from fedprior.core.settings import Settings
from fedprior.em import Batch


@dataclass(frozen=True)
class Workload:
    """How long a client trains: `epochs` passes over its examples, or `steps` batches if given."""

    batch_size: int
    epochs: int = 1
    steps: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Workload":
        """As a run's settings say."""
        return cls(settings.batch_size, settings.epochs, settings.local_steps)

    def per_epoch(self, size: int) -> int:
        """The number of batches in one pass over `size` examples; the last may be smaller."""
        return -(-size // self.batch_size)

    def total(self, size: int) -> int:
        """The number of local steps of a client with `size` examples."""
        return self.steps if self.steps is not None else self.epochs * self.per_epoch(size)


class ClientBatches:
    """One client's batches, without padding, gathered on demand."""

    def __init__(self, data: FederatedData, client: int, workload: Workload, key: Tensor) -> None:
        self.data, self.workload, self.key = data, workload, key
        self.rows, self.size = data.train[client], data.train.size(client)
        self.epoch, self.order = -1, self.rows

    def __len__(self) -> int:
        return self.workload.total(self.size)

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < len(self):
            raise IndexError(step)
        epoch, place = divmod(step, self.workload.per_epoch(self.size))
        if epoch != self.epoch:
            drawn = keys.permutation(keys.fold(self.key, epoch), self.size, self.size)
            self.epoch, self.order = epoch, self.rows[drawn.to(self.rows.device)]
        width = self.workload.batch_size
        chosen = self.order[place * width : (place + 1) * width]
        device = self.key.device
        return Batch(self.data.x[chosen].to(device), self.data.y[chosen].to(device), None, None)


@dataclass(frozen=True)
class Extent:
    """What the host must know about a cohort before it makes tensors: how many there are, and how large."""

    steps: int
    """The most local steps of any client."""
    epochs: int
    """The most passes of any client."""
    capacity: int
    """Places for a client's examples, in whole batches, so that cohorts of similar size have the same extent."""
    even: bool
    """Whether all clients take the same number of steps."""
    whole: int = 0
    """How many leading batches of each pass are full for all clients, if all have the same number of batches."""

    @classmethod
    def of(cls, sizes: list[int], workload: Workload) -> "Extent":
        """That of clients with these numbers of examples."""
        totals = [workload.total(size) for size in sizes]
        epochs = max(-(-total // workload.per_epoch(size)) for total, size in zip(totals, sizes, strict=True))
        passes, width = {workload.per_epoch(size) for size in sizes}, workload.batch_size
        whole = min(sizes) // width if len(passes) == 1 else 0
        return cls(max(totals), epochs, max(passes) * width, len(set(totals)) == 1, whole)


class Places(NamedTuple):
    """Where the examples of each client in a cohort are: `rows[start : start + size]`."""

    rows: Tensor
    start: Tensor
    size: Tensor

    def padded(self, capacity: int) -> Tensor:
        """One line of rows per client; further places repeat its last row."""
        offset = torch.arange(capacity, device=self.rows.device)
        last = (self.size - 1).clamp(min=0)
        places = self.start[:, None] + torch.minimum(offset, last[:, None])
        return self.rows[places.clamp(max=len(self.rows) - 1)]


class CohortBatches:
    """A cohort's stacked batches, [clients, batch, …], padded if a client has fewer examples or steps.

    Everything is a tensor: with the same extent, a captured graph can serve other clients with other numbers.
    """

    def __init__(
        self, x: ModelInputs, y: Tensor, places: Places, workload: Workload, extent: Extent, key: Tensor
    ) -> None:
        self.x, self.extent, self.width, device = x, extent, workload.batch_size, key.device
        per_epoch = (places.size + self.width - 1) // self.width
        total = per_epoch * workload.epochs
        total = total if workload.steps is None else torch.full_like(total, workload.steps)

        def orders(key: Tensor, size: Tensor, epoch: Tensor) -> Tensor:
            return keys.permutation(keys.fold(key, epoch), size, extent.capacity)

        over_epochs = torch.func.vmap(orders, (None, None, 0))
        epochs = torch.arange(extent.epochs, device=device)
        order = torch.func.vmap(over_epochs, (0, 0, None))(key, places.size, epochs)
        # All steps at once: [clients, steps, batch].
        steps = torch.arange(extent.steps, device=device)
        self.active = total[:, None] > steps
        # A client that has finished repeats its last step; `active` then discards the result.
        step_of = torch.minimum(steps, total[:, None] - 1)
        epoch, place = step_of // per_epoch[:, None], step_of % per_epoch[:, None]
        positions = place[..., None] * self.width + torch.arange(self.width, device=device)
        shuffled = order.flatten(1).gather(1, (positions + epoch[..., None] * extent.capacity).flatten(1))
        self.rows = places.padded(extent.capacity).gather(1, shuffled).view(positions.shape)
        self.y = y[self.rows]
        self.weight = (positions < places.size[:, None, None]).to(real_type(x))

    def __len__(self) -> int:
        return self.extent.steps

    def __getitem__(self, step: int) -> Batch:
        if step >= self.extent.steps:
            raise IndexError(step)
        full = step % (self.extent.capacity // self.width) < self.extent.whole
        weight = None if full else self.weight[:, step]
        return Batch(
            self.x[self.rows[:, step]], self.y[:, step], weight, None if self.extent.even else self.active[:, step]
        )
