"""Partitions by name, for any labelled set: iid, shards, dirichlet, classes, quantity, column.

Each gives every example to at most one client, leaves no client without training examples, and always gives the same
result for a seed. A client's test examples match its training examples: the same mix of classes, share of the data, or
user.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprior.catalogue.data.partition import Parts, _check_clients, _deal, _random_state, dirichlet
from fedprior.core.errors import DataError, SettingError
from fedprior.core.federated import ClientData
from fedprior.core.inputs import ModelInputs, as_inputs, tensors
from fedprior.core.options import Option, convert, nearest

Labels = np.ndarray


def iid(labels: Labels, test_labels: Labels, clients: int, seed: int) -> Parts:
    """All clients have the same number of examples, give or take one, drawn from all."""
    _check_clients(clients, len(labels))
    random = _random_state(seed)
    train, test = (np.array_split(random.permutation(len(values)), clients) for values in (labels, test_labels))
    return train, test


def shards(labels: Labels, test_labels: Labels, clients: int, seed: int, each: int = 2) -> Parts:
    """McMahan et al. (2017): sort examples by label and cut them into shards; each client gets `each` of them.

    Its test examples are drawn from its own mix of classes, without replacement, the same number for every client.
    """
    _positive("shards", each)
    _enough(clients, each, len(labels))
    random = _random_state(seed)
    # Shuffled first, so that chance decides which examples of a class are in a shard.
    mixed = random.permutation(len(labels))
    pieces = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], clients * each)
    dealt = random.permutation(clients * each).reshape(clients, each)
    train = [np.concatenate([pieces[place] for place in own]) for own in dealt]
    classes = int(max(labels.max(), test_labels.max() if len(test_labels) else 0)) + 1
    mixes = np.stack([np.bincount(labels[rows], minlength=classes) / len(rows) for rows in train])
    return train, _deal(test_labels, mixes, len(test_labels) // clients, random)


def classes(labels: Labels, test_labels: Labels, clients: int, alpha: float, seed: int, least: int = 2) -> Parts:
    """Yurochkin et al. (2019): the clients' shares of every class are drawn from Dir(α), so that sizes differ as well.

    A client with fewer than `least` training examples takes some from the clients with the most.
    """
    _concentration(alpha)
    _enough(clients, least, len(labels))
    random = _random_state(seed)
    train: list[list[np.ndarray]] = [[] for _ in range(clients)]
    test: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(int(max(labels.max(), test_labels.max() if len(test_labels) else 0)) + 1):
        bounds = np.cumsum(_shares(random, alpha, clients))[:-1]
        for values, parts in ((labels, train), (test_labels, test)):
            rows = random.permutation(np.flatnonzero(values == label))
            for part, own in zip(parts, np.split(rows, np.round(bounds * len(rows)).astype(int)), strict=True):
                part.append(own)
    return _at_least(least, [np.concatenate(parts) for parts in train]), [np.concatenate(parts) for parts in test]


def quantity(labels: Labels, test_labels: Labels, clients: int, alpha: float, seed: int, least: int = 2) -> Parts:
    """Li et al. (2022): all clients have the same mix of classes, but their shares of the data come from Dir(α)."""
    _concentration(alpha)
    _enough(clients, least, len(labels))
    random = _random_state(seed)
    bounds = np.cumsum(_shares(random, alpha, clients))[:-1]
    cut = [
        np.split(random.permutation(len(values)), np.round(bounds * len(values)).astype(int))
        for values in (labels, test_labels)
    ]
    return _at_least(least, cut[0]), cut[1]


def column(owners: np.ndarray, test_owners: np.ndarray, least: int = 2) -> Parts:
    """One client per user, in the order of their names, without users with fewer than `least` training examples."""
    order = np.argsort(owners, kind="stable")
    names, starts = np.unique(owners[order], return_index=True)
    parts = {name: np.sort(rows) for name, rows in zip(names.tolist(), np.split(order, starts[1:]), strict=True)}
    kept = {name: rows for name, rows in parts.items() if len(rows) >= least}
    if not kept:
        raise DataError(f"no user has {least} training examples")
    return list(kept.values()), [np.flatnonzero(test_owners == name) for name in kept]


PARTITIONS = ("iid", "shards", "dirichlet", "classes", "quantity", "column")


def divide(
    labels: Any,
    test_labels: Any = (),
    *,
    partition: str = "iid",
    clients: int = 100,
    alpha: float = 1.0,
    shards_each: int = 2,
    owners: Any = None,
    test_owners: Any = (),
    seed: int = 0,
) -> Parts:
    """The rows of every client's training and test examples; see PARTITIONS and the functions above.

    dirichlet, classes and quantity take `alpha`, shards takes `shards_each`, and column takes `owners`, one user per
    example.

    >>> train, test = divide([0, 0, 1, 1], partition="shards", clients=2, shards_each=1)
    >>> sorted(rows.tolist() for rows in map(np.sort, train))
    [[0, 1], [2, 3]]
    """
    if partition not in PARTITIONS:
        raise nearest(partition, PARTITIONS, "partition")
    clients, shards_each, seed = _whole("clients", clients), _whole("shards_each", shards_each), _whole("seed", seed)
    alpha = convert(Option("alpha", float, 1.0), alpha)
    if partition == "column":
        if owners is None:
            raise SettingError("a partition by column needs the column: owners=…, one user per example")
        _check_owners("", labels, owners)
        if len(test_labels):  # divided by owner alone, test examples need no labels
            _check_owners("test_", test_labels, test_owners)
        return column(_array(owners), _array(test_owners))
    if owners is not None:
        raise SettingError(f"only partition='column' takes owners, not {partition!r}")
    y, test_y = _labels(labels, partition), _labels(test_labels, partition)
    named: dict[str, Callable[[], Parts]] = {
        "iid": lambda: iid(y, test_y, clients, seed),
        "shards": lambda: shards(y, test_y, clients, seed, shards_each),
        "dirichlet": lambda: dirichlet(y, test_y, clients, alpha, seed),
        "classes": lambda: classes(y, test_y, clients, alpha, seed),
        "quantity": lambda: quantity(y, test_y, clients, alpha, seed),
    }
    return named[partition]()


def clients_from(
    x: Any,
    y: Any,
    *,
    test: tuple[Any, Any] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    owners: Any = None,
    test_owners: Any = (),
    **options: Any,
) -> list[ClientData]:
    """Make clients for `own_task` from one set: `clients_from(x, y, partition="dirichlet", clients=20, alpha=0.5)`.

    Without a `test` set, a share of each client's own examples is held out. The other options are those of `divide`.
    NumPy arrays and lists become tensors.
    """
    x, y = _pair("(x, y)", (x, y))
    if test is not None:
        test = _pair("test", test)
    if not 0 <= test_fraction < 1:
        raise SettingError(f"test_fraction must be at least 0 and below 1, got {test_fraction}")
    try:
        if test is not None:
            given = {"owners": owners, "test_owners": test_owners, "seed": seed, **options}
            train_rows, test_rows = divide(y, test[1], **given)
        else:
            test = x, y
            train_rows, _ = divide(y, owners=owners, seed=seed, **options)
            train_rows, test_rows = _hold_out(train_rows, test_fraction, seed)
    except TypeError as error:
        raise SettingError(f"clients_from: {error}") from error
    pairs = [(torch.from_numpy(own), torch.from_numpy(held)) for own, held in zip(train_rows, test_rows, strict=True)]
    return [(x[own], y[own], test[0][held], test[1][held]) for own, held in pairs]


def _hold_out(parts: Sequence[np.ndarray], share: float, seed: int) -> Parts:
    """Hold out a random share of each client's examples, but leave at least two for training."""
    random = _random_state(seed + 1)
    train, test = [], []
    for rows in parts:
        mixed, held = random.permutation(rows), max(min(round(share * len(rows)), len(rows) - 2), 0)
        train.append(np.sort(mixed[held:]))
        test.append(np.sort(mixed[:held]))
    return train, test


def _at_least(least: int, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Let clients with fewer than `least` examples take the last ones of the client with the most."""
    for place, rows in enumerate(parts):
        while len(parts[place]) < least:
            rich = int(np.argmax([len(part) for part in parts]))
            parts[place], parts[rich] = np.append(parts[place], parts[rich][-1]).astype(rows.dtype), parts[rich][:-1]
    return parts


def _shares(random: np.random.RandomState, alpha: float, clients: int) -> np.ndarray:
    """Draw from Dir(α). For a tiny α the draw underflows to 0/0; there we use the limit, a single client."""
    drawn = random.dirichlet(np.full(clients, alpha))
    return np.eye(clients)[random.randint(clients)] if np.isnan(drawn).any() else drawn


def _array(values: Any) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _pair(name: str, given: Any) -> tuple[ModelInputs, Tensor]:
    """Inputs and targets as tensors of one length; several inputs are a dictionary."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f"{name} must be two tensors, inputs and targets")
    try:
        inputs, y = given[0], _tensor(given[1])
        several = isinstance(inputs, Mapping)
        x = as_inputs({key: _tensor(part) for key, part in inputs.items()}) if several else _tensor(inputs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} cannot become tensors: {str(error).splitlines()[0]}") from error
    lengths = [len(part) if part.dim() else "single" for part in (*tensors(x), y)]
    if "single" in lengths or len(set(lengths)) > 1:
        counts = zip(inputs, lengths, strict=False) if several else [("inputs", lengths[0])]
        each = ", ".join(f"{count} {part}" for part, count in counts)
        raise DataError(f"there are {each} but {lengths[-1]} targets in {name}")
    return x, y


def _tensor(values: Any) -> Tensor:
    """A copy of an array, because torch warns about read-only ones; anything else as torch has it."""
    return torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def _check_owners(kind: str, labels: Any, owners: Any) -> None:
    if len(owners) != len(labels):
        raise DataError(f"{kind}owners has {len(owners)} users for {len(labels)} examples: pass one user per example")


def _whole(name: str, value: Any) -> int:
    number: int = convert(Option(name, int, 0), value)
    return number


def _labels(values: Any, name: str) -> np.ndarray:
    found = _array(values)
    if not len(found):
        return np.zeros(0, np.int64)
    if name in ("iid", "quantity"):  # any targets will do
        return found[:, 0] if found.ndim > 1 else found
    if found.ndim != 1 or found.dtype.kind not in "iub" or found.min() < 0:
        raise DataError(f"the partition {name!r} needs one label per example, a whole number of at least 0")
    return found.astype(np.int64)


def _enough(clients: int, each: int, examples: int) -> None:
    _check_clients(clients, examples)
    if clients * each > examples:
        raise DataError(f"{examples} training examples are not enough to give {clients} clients {each} each")


def _concentration(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise SettingError(f"alpha must be above 0 and finite, got {alpha}")


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise SettingError(f"{name} must be at least 1, got {value}")
