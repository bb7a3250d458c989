"""All clients' examples in one array, and for each client the rows that are its own.

A client costs two slices of an index array, so a hundred thousand of them cost no more than their examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedprior.errors import DataError

ClientData = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
"""A client's inputs and targets, and optionally its test inputs and targets."""


@dataclass(frozen=True)
class Shards:
    """Rows of an array, client after client: client s owns `rows[offsets[s]:offsets[s + 1]]`."""

    rows: Tensor
    offsets: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[np.ndarray | Tensor]) -> "Shards":
        """From one index array a client."""
        sizes = [len(part) for part in parts]
        rows = np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.zeros(0, np.int64)
        return cls(torch.from_numpy(rows), np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def size(self, client: int) -> int:
        """How many rows a client has."""
        return int(self.offsets[client + 1] - self.offsets[client])


@dataclass(frozen=True)
class FederatedData:
    """Training and test examples of every client. The global test set is the union of the clients' test sets."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    train: Shards
    test: Shards
    classes: int

    @classmethod
    def from_clients(
        cls, clients: Sequence[ClientData], *, classes: int | None = None, min_examples: int = 2
    ) -> "FederatedData":
        """From one `(x, y)` or `(x, y, test_x, test_y)` a client."""
        if not clients:
            raise DataError("there are no clients")
        x, y = torch.cat([c[0] for c in clients]), torch.cat([c[1] for c in clients])
        tests = [(c[2], c[3]) if len(c) == 4 else (c[0][:0], c[1][:0]) for c in clients]
        test_x, test_y = torch.cat([t[0] for t in tests]), torch.cat([t[1] for t in tests])
        data = cls(
            x,
            y,
            test_x,
            test_y,
            _runs([len(c[1]) for c in clients]),
            _runs([len(t[1]) for t in tests]),
            classes if classes is not None else int(y.max()) + 1 if len(y) else 0,
        )
        data.check(min_examples)
        return data

    def check(self, min_examples: int = 2) -> None:
        """Refuse what cannot be trained on, naming the client."""
        for what, x, y, shards in (
            ("training", self.x, self.y, self.train),
            ("test", self.test_x, self.test_y, self.test),
        ):
            if len(x) != len(y):
                raise DataError(f"there are {len(x)} {what} inputs but {len(y)} {what} targets")
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise DataError(f"the {what} inputs hold numbers that are not finite")
            self._check_labels(what, y, shards)
        for client, size in enumerate(np.diff(self.train.offsets)):
            if size == 0:
                raise DataError(f"client {client} has no training examples; leave it out")
            if size < min_examples:
                raise DataError(
                    f"client {client} has only {size} training example; leave it out, or pass min_examples=1"
                )

    def _check_labels(self, what: str, labels: Tensor, shards: Shards) -> None:
        """Class labels must run from 0 to classes − 1; a target of real numbers is not a label."""
        if labels.is_floating_point() or labels.dim() != 1:
            return
        wrong = (labels < 0) | (labels >= self.classes)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            places = (shards.rows == row).nonzero()
            client = int(np.searchsorted(shards.offsets, int(places[0]), side="right")) - 1 if len(places) else "?"
            label = int(labels[row])
            raise DataError(
                f"client {client} has the {what} label {label}, but labels run from 0 to {self.classes - 1}"
            )

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)

    def to(self, device: torch.device | str) -> "FederatedData":
        """The same data resident on a device."""
        move = {name: getattr(self, name).to(device) for name in ("x", "y", "test_x", "test_y")}
        return replace(
            self,
            **move,
            train=Shards(self.train.rows.to(device), self.train.offsets),
            test=Shards(self.test.rows.to(device), self.test.offsets),
        )


def _runs(sizes: Sequence[int]) -> Shards:
    """Consecutive rows."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Shards(torch.arange(int(offsets[-1])), offsets)
