"""What counting achieves on a task of text: `python -m fedprior_experiments.n_grams [shakespeare-mini] [NAME=VALUE …]`.

An n-gram model predicts a symbol from the n − 1 before it, by their counts in everybody's training text. Longer
contexts are mixed with shorter ones after Witten and Bell (1991). It sees the same windows as the network, and no more.
"""

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedprior.catalogue.tasks import task
from fedprior.core.errors import DataError
from fedprior.core.federated import FederatedData
from fedprior.core.inputs import ModelInputs
from fedprior.report.table import Table

Numbers = npt.NDArray[np.int64]
ORDERS = (1, 2, 3, 4)


class Score(NamedTuple):
    """How well a model predicts the test text."""

    accuracy: float
    bits: float
    """Per symbol."""


def n_gram_scores(data: FederatedData, order: int, block: int = 512) -> list[Score]:
    """The scores of the models of order 1 to `order`, on everybody's test windows."""
    x, y, symbols = *_windows(data.x, data.y, data.train.rows), data.classes
    tables = [_counts(_contexts(x, size, symbols).ravel(), y.ravel(), symbols) for size in range(order)]
    rights, bits = np.zeros(order), np.zeros(order)
    rows = data.test.rows
    for start in range(0, len(rows), block):
        inputs, targets = _windows(data.test_x, data.test_y, rows[start : start + block])
        odds = np.full((targets.size, symbols), 1 / symbols)
        for size, (known, counts) in enumerate(tables):
            odds = _mixed(odds, counts[_places(known, _contexts(inputs, size, symbols).ravel())])
            rights[size] += (odds.argmax(1) == targets.ravel()).sum()
            bits[size] -= np.log2(odds[np.arange(targets.size), targets.ravel()]).sum()
    total = len(rows) * data.test_y.shape[1]
    return [Score(right / total, bit / total) for right, bit in zip(rights, bits, strict=True)]


def _windows(x: ModelInputs, y: Tensor, rows: Tensor) -> tuple[Numbers, Numbers]:
    """Some windows and what comes next in them."""
    if not isinstance(x, Tensor):
        raise DataError("n-grams are counted in one sequence, and these examples have several inputs")
    return x[rows].numpy(), y[rows].numpy()


def _contexts(x: Numbers, size: int, symbols: int) -> Numbers:
    """A number for the `size` symbols up to each place; places before the window hold a symbol of their own."""
    found = np.zeros_like(x)
    for back in range(size):
        earlier = np.full_like(x, symbols)
        earlier[:, back:] = x[:, : x.shape[1] - back]
        found = found * (symbols + 1) + earlier
    return found


def _counts(contexts: Numbers, targets: Numbers, symbols: int) -> tuple[Numbers, Numbers]:
    """Every context that occurs, and what follows it how often; the last row, for all others, is zero."""
    known, place = np.unique(contexts, return_inverse=True)
    counts = np.bincount(place * symbols + targets, minlength=(len(known) + 1) * symbols)
    return known, counts.reshape(-1, symbols)


def _places(known: Numbers, contexts: Numbers) -> Numbers:
    near = np.minimum(np.searchsorted(known, contexts), len(known) - 1)
    return np.where(known[near] == contexts, near, len(known))


def _mixed(shorter: npt.NDArray[np.float64], counts: Numbers) -> npt.NDArray[np.float64]:
    """Counts of a context, with as much trust in the shorter one as there are different symbols after it."""
    total, kinds = counts.sum(1, keepdims=True), (counts > 0).sum(1, keepdims=True)
    return np.where(total > 0, (counts + kinds * shorter) / np.maximum(total + kinds, 1), shorter)


def main(name: str = "shakespeare-mini", *options: str) -> None:
    """Print the scores of n-gram models on a task."""
    chosen: dict[str, Any] = dict(option.split("=", 1) for option in options)
    data = task(name, **chosen).data
    scores = enumerate(n_gram_scores(data, max(ORDERS)), 1)
    rows = [[str(order), f"{100 * score.accuracy:.1f}%", f"{score.bits:.3f}"] for order, score in scores]
    sys.stdout.write(Table(["n", "accuracy", "bits"], rows, name).text() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
