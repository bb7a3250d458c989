"""Which examples a client sees at each local step: the same for a padded and an unpadded client."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior import keys
from fedprior.data import FederatedData
from fedprior.em import Batch


@dataclass(frozen=True)
class Schedule:
    """How long a client trains: `epochs` passes over its examples, or `steps` batches if given."""

    batch_size: int
    epochs: int = 1
    steps: int | None = None

    def per_epoch(self, size: int) -> int:
        """Batches in one pass over `size` examples; the last may be smaller."""
        return -(-size // self.batch_size)

    def total(self, size: int) -> int:
        """Local steps of a client with `size` examples."""
        return self.steps if self.steps is not None else self.epochs * self.per_epoch(size)


def client_batches(data: FederatedData, client: int, schedule: Schedule, key: Tensor) -> list[Batch]:
    """One client's batches, each as long as it is."""
    rows, size = data.train[client], data.train.size(client)
    per_epoch, width = schedule.per_epoch(size), schedule.batch_size
    batches, order = [], rows
    for step in range(schedule.total(size)):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = rows[keys.permutation(keys.fold(key, epoch), size, size)]
        chosen = order[place * width : (place + 1) * width]
        batches.append(Batch(data.x[chosen], data.y[chosen], None, None))
    return batches


class CohortBatches:
    """A cohort's batches stacked [clients, batch, …], padded where a client has fewer examples or steps."""

    def __init__(self, data: FederatedData, clients: list[int], schedule: Schedule, key: Tensor) -> None:
        device = data.x.device
        sizes = [data.train.size(client) for client in clients]
        self.data, self.width, self.capacity = data, schedule.batch_size, max(sizes)
        self.totals = torch.tensor([schedule.total(size) for size in sizes], device=device)
        self.per_epoch = torch.tensor([schedule.per_epoch(size) for size in sizes], device=device)
        self.sizes = torch.tensor(sizes, device=device)
        self.steps = max(schedule.total(size) for size in sizes)
        self.even = len({schedule.total(size) for size in sizes}) == 1
        epochs = max(-(-schedule.total(size) // schedule.per_epoch(size)) for size in sizes)
        self.rows = torch.nn.utils.rnn.pad_sequence([data.train[client] for client in clients], batch_first=True)

        def orders(key: Tensor, size: Tensor, epoch: Tensor) -> Tensor:
            return keys.permutation(keys.fold(key, epoch), size, self.capacity)

        over_epochs = torch.func.vmap(orders, (None, None, 0))
        self.orders = torch.func.vmap(over_epochs, (0, 0, None))(key, self.sizes, torch.arange(epochs, device=device))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        if step >= self.steps:
            raise IndexError(step)
        active = step < self.totals
        # A client that has finished repeats its last step; `active` then discards the result.
        step_of = torch.minimum(torch.as_tensor(step, device=self.totals.device), self.totals - 1)
        epoch, place = step_of // self.per_epoch, step_of % self.per_epoch
        order = self.orders[torch.arange(len(epoch), device=epoch.device), epoch]
        positions = place[:, None] * self.width + torch.arange(self.width, device=epoch.device)
        weight = positions < self.sizes[:, None]
        chosen = self.rows.gather(1, order.gather(1, positions.clamp(max=self.capacity - 1)))
        x, y = self.data.x[chosen], self.data.y[chosen]
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return Batch(x, y, weight.to(dtype), None if self.even else active)
