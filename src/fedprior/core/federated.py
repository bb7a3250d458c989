"""All clients' examples in one array, and the rows that belong to each client.

A client costs two slices of an index array, so a hundred thousand clients cost no more than their examples.
"""

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedprior.core.errors import DataError, described
from fedprior.core.inputs import ModelInputs, Several, as_inputs, joined, tensors

ClientData = tuple[ModelInputs, Tensor] | tuple[ModelInputs, Tensor, ModelInputs, Tensor]
"""A client's inputs and targets, and optionally its test inputs and targets. Several inputs are a dictionary."""


def fingerprint(parts: Iterable[np.ndarray]) -> str:
    """16 digits that identify a partition: which client has which rows, in which order.

    >>> fingerprint([np.array([0, 2]), np.array([1])])
    '7fe2289c77ac9adc'
    """
    text = ";".join(",".join(map(str, np.asarray(part).tolist())) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Shards:
    """Rows of an array, client after client: client s owns `rows[offsets[s]:offsets[s + 1]]`."""

    rows: Tensor
    offsets: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[np.ndarray | Tensor]) -> "Shards":
        """Build from one index array per client."""
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

    @property
    def sizes(self) -> np.ndarray:
        """How many rows each client has."""
        return np.diff(self.offsets)

    @cached_property
    def distinct(self) -> Tensor:
        """Every row that some client has, listed once. The result is cached."""
        rows: Tensor = self.rows.unique()
        return rows

    def owner(self, marked: Tensor) -> int | str:
        """The client that owns the first marked row, for use in error messages."""
        places = (self.rows == int(marked.nonzero()[0])).nonzero()
        return int(np.searchsorted(self.offsets, int(places[0]), side="right")) - 1 if len(places) else "?"


@dataclass(frozen=True)
class FederatedData:
    """Training and test examples of every client. The global test set is the union of the clients' test sets."""

    x: ModelInputs
    y: Tensor
    test_x: ModelInputs
    test_y: Tensor
    train: Shards
    test: Shards
    classes: int
    """0 if targets are not classes."""

    def __repr__(self) -> str:
        """Show counts rather than the examples themselves."""
        examples = f"{len(self.train.rows):,} training and {len(self.test.rows):,} test examples"
        return f"FederatedData({self.clients:,} clients, {examples}, {self.classes or 'no'} classes)"

    @classmethod
    def from_clients(
        cls, clients: Sequence[ClientData], *, classes: int | None = None, min_examples: int = 2
    ) -> "FederatedData":
        """Build from one `(x, y)` or `(x, y, test_x, test_y)` per client."""
        clients = _listed(clients)
        for client, parts in enumerate(clients):
            _check_client(client, parts, clients[0])
        x, y = joined([c[0] for c in clients]), _labels(torch.cat([c[1] for c in clients]))
        tests = [(c[2], c[3]) if len(c) == 4 and len(c[3]) else (c[0][:0], c[1][:0]) for c in clients]
        test_x, test_y = joined([t[0] for t in tests]), _labels(torch.cat([t[1] for t in tests]))
        data = cls(
            x,
            y,
            test_x,
            test_y,
            _runs([len(c[1]) for c in clients]),
            _runs([len(t[1]) for t in tests]),
            classes if classes is not None else 0 if y.is_floating_point() else int(torch.cat([y, test_y]).max()) + 1,
        )
        data.check(min_examples, counted=classes is None)
        return data

    def check(self, min_examples: int = 2, *, counted: bool = False) -> None:
        """Refuse data that cannot be trained on, and name the client.

        If `counted`, there are as many classes as the labels say, so only what is below zero is known to be wrong.
        """
        for what, x, y, shards in (
            ("training", self.x, self.y, self.train),
            ("test", self.test_x, self.test_y, self.test),
        ):
            if len(x) != len(y):
                raise DataError(f"there are {len(x)} {what} inputs but {len(y)} {what} targets")
            for part, values in (*(("inputs", one) for one in tensors(x)), ("targets", y)):
                wrong = _not_finite(values)
                if bool(wrong.any()):
                    raise DataError(f"client {shards.owner(wrong)} has {what} {part} that are not finite numbers")
            self._check_labels(
                what, y, shards, "count from 0" if counted else f"must lie between 0 and {self.classes - 1}"
            )
        sizes = np.diff(self.train.offsets)
        for client in np.flatnonzero(sizes < max(min_examples, 1))[:1]:
            if sizes[client] == 0:
                raise DataError(f"client {client} has no training examples; leave it out")
            raise DataError(
                f"client {client} has only {sizes[client]} training example; leave it out, or pass min_examples=1"
            )

    def _check_labels(self, what: str, labels: Tensor, shards: Shards, rule: str) -> None:
        """Check that class labels run from 0 to classes − 1. Real numbers are not labels; 0 classes means none."""
        if labels.is_floating_point() or labels.dim() != 1 or self.classes == 0:
            return
        wrong = (labels < 0) | (labels >= self.classes)
        if bool(wrong.any()):
            raise DataError(
                f"client {shards.owner(wrong)} has the {what} label {int(labels[wrong][0])}, but labels {rule}"
            )

    @property
    def labelled(self) -> bool:
        """Whether each example has one class label, so that examples can be counted by class."""
        return self.classes > 0 and self.y.dim() == 1 and not self.y.is_floating_point()

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)

    def fingerprint(self) -> str:
        """Identifies the partition: the rows of every client's training examples, then of its test examples."""
        parts = [np.split(shards.rows.cpu().numpy(), shards.offsets[1:-1]) for shards in (self.train, self.test)]
        return fingerprint(parts[0] + parts[1])

    def class_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Count training and test examples by client and class, [clients, classes]; one column without labels."""
        counts = []
        for labels, shards in ((self.y, self.train), (self.test_y, self.test)):
            rows, classes = shards.rows.cpu().numpy(), self.classes if self.labelled else 1
            column = labels.cpu().numpy()[rows] if self.labelled else np.zeros(len(rows), np.int64)
            owner = np.repeat(np.arange(self.clients), np.diff(shards.offsets))
            flat = np.bincount(owner * classes + column, minlength=self.clients * classes)
            counts.append(flat.reshape(self.clients, classes))
        return counts[0], counts[1]

    def tensors(self) -> list[Tensor]:
        """Every tensor of examples."""
        return [*tensors(self.x), self.y, *tensors(self.test_x), self.test_y]

    def fits(self, device: torch.device, share: float = 0.6) -> bool:
        """Whether the examples take less than this share of the GPU's free memory or are already there."""
        parts = {id(part): part for part in self.tensors()}.values()
        if device.type != "cuda":
            return True
        missing = [part for part in parts if part.device != device and str(device) not in _RESIDENT.get(part, {})]
        return sum(part.nbytes for part in missing) < share * torch.cuda.mem_get_info(device)[0]

    def to(self, device: torch.device | str) -> "FederatedData":
        """Put the data on a device. Partitions of the same examples share one copy."""
        names = ("x", "y", "test_x", "test_y")
        move: dict[str, Any] = {name: _resident(getattr(self, name), torch.device(device)) for name in names}
        return replace(
            self,
            **move,
            train=Shards(self.train.rows.to(device), self.train.offsets),
            test=Shards(self.test.rows.to(device), self.test.offsets),
        )


_RESIDENT: MutableMapping[Tensor, dict[str, Tensor]] = WeakIdKeyDictionary()


def _resident(values: ModelInputs, device: torch.device) -> ModelInputs:
    """Copy examples to a device once, and reuse the copy for as long as the original lives."""
    if isinstance(values, Several):
        return Several({name: _moved(part, device) for name, part in values.parts.items()})
    return _moved(values, device)


def _moved(values: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if values.device == device or device.type == "cpu":
        return values.to(device)
    copies = _RESIDENT.setdefault(values, {})
    if str(device) not in copies:
        copies[str(device)] = values.to(device)
    return copies[str(device)]


def _listed(clients: Any) -> list[ClientData]:
    """Return the clients as a list; refuse anything that is not a sequence of clients."""
    if isinstance(clients, Mapping):
        raise DataError("the clients are a dictionary; pass a list instead: list(clients.values())")
    if not isinstance(clients, Iterable) or isinstance(clients, Tensor | np.ndarray | str):
        raise DataError(
            f"the clients are {described(clients)}; pass a list with one tuple of tensors (x, y) per client"
        )
    found = list(clients)
    if not found:
        raise DataError("there are no clients")
    named: list[Any] = [tuple(map(as_inputs, one)) if isinstance(one, tuple | list) else one for one in found]
    return named


def _check_client(client: int, parts: ClientData, first: ClientData) -> None:
    """Refuse a client whose data cannot share one array with the others."""
    if isinstance(parts, tuple | list) and any(isinstance(part, np.ndarray) for part in parts):
        raise DataError(f"client {client} has NumPy arrays; pass tensors instead: torch.from_numpy(array)")
    if (
        not isinstance(parts, tuple | list)
        or len(parts) not in (2, 4)
        or not all(_is_column(part, several=place % 2 == 0) for place, part in enumerate(parts))
    ):
        raise DataError(f"client {client} is not a tuple of tensors (x, y) or (x, y, test_x, test_y)")
    for what, x, y in (("training", *parts[:2]), ("test", *parts[2:]))[: len(parts) // 2]:
        if len(x) != len(y):
            raise DataError(f"client {client} has {len(x)} {what} inputs but {len(y)} {what} targets")
        for part, mine, others in (*_pairs(client, x, first[0]), ("targets", y, first[1])):
            if len(mine) and (mine.shape[1:], mine.dtype) != (others.shape[1:], others.dtype):
                raise DataError(
                    f"client {client} has {what} {part} of shape {tuple(mine.shape[1:])} and {mine.dtype}, "
                    f"but client 0 has shape {tuple(others.shape[1:])} and {others.dtype}"
                )
    if len(parts[1]) == 0:
        raise DataError(f"client {client} has no training examples; leave it out")


def _is_column(values: object, *, several: bool) -> bool:
    """Whether these are examples: tensors with a row for each."""
    parts = tensors(values) if several and isinstance(values, Several) else [values]
    return all(isinstance(part, Tensor) and part.dim() > 0 for part in parts)


def _pairs(client: int, x: ModelInputs, first: ModelInputs) -> list[tuple[str, Tensor, Tensor]]:
    """A client's inputs beside those of client 0, each with what it is called."""
    names, known = (list(one.parts) if isinstance(one, Several) else [""] for one in (x, first))
    if names != known:
        raise DataError(f"client {client} has the inputs {names}, but client 0 has {known}")
    if len({len(part) for part in tensors(x)}) > 1:
        raise DataError(f"client {client} has inputs of different length: {x}")
    called = [f"inputs {name!r}" if name else "inputs" for name in names]
    return list(zip(called, tensors(x), tensors(first), strict=True))


def _not_finite(values: Tensor, block: int = 2**20) -> Tensor:
    """Mark the examples with a number that is not finite. Works in blocks, because torch copies what it checks.

    The extremes of a block are finite if all of it is, and need no copy.
    """
    if not values.is_floating_point() or not len(values):
        return torch.zeros(len(values), dtype=torch.bool)
    flat = values.reshape(len(values), -1)
    return torch.cat([_marked(part) for part in flat.split(max(1, block // max(1, flat.shape[1])))])


def _marked(rows: Tensor) -> Tensor:
    if rows.numel() and bool(torch.stack(torch.aminmax(rows)).isfinite().all()):
        return torch.zeros(len(rows), dtype=torch.bool)
    return ~rows.isfinite().all(1).cpu()


def _labels(targets: Tensor) -> Tensor:
    """Convert whole numbers to the type that losses expect."""
    return targets if targets.is_floating_point() else targets.long()


def _runs(sizes: Sequence[int]) -> Shards:
    """Give consecutive rows to each client."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Shards(torch.arange(int(offsets[-1])), offsets)
