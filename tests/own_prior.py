"""Priors that the library does not have, as algorithms with names: for the contract.

One is that of docs/new-prior.md. The other tells its clients more than weights.
"""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedprior.catalogue.algorithms import Entry
from fedprior.catalogue.algorithms.options import SGD
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import mean
from fedprior.em import Algorithm
from fedprior.priors import Assignment, Prior
from fedprior.priors.gaussian import squared_distance

NAME, TREND = "student-t", "trend"
DOCUMENT = Path(__file__).parents[1] / "docs" / "new-prior.md"
TEXT = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]


def student_t() -> Any:
    """The class, from the document's own text."""
    namespace: dict[str, object] = {"__name__": "new_prior"}
    exec(TEXT, namespace)
    return namespace["StudentT"]


@dataclass(frozen=True)
class Trend(Prior):
    """N(w + β m, 1/λ), where m is how far the server moved in the last round."""

    precision: float = 0.1
    share: float = 0.5
    scalars = ("precision", "share")
    told = ("weights", "moved")

    def init(self, params: Params) -> Tree:
        return {"weights": params, "moved": {name: value * 0 for name, value in params.items()}}

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        expected = {name: w + self.share * server["moved"][name] for name, w in server["weights"].items()}
        return -self.precision / 2 * squared_distance(assignment.weights, expected)

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        new = {name: mean(value, weight) for name, value in assignments.weights.items()}
        return {**server, "weights": new, "moved": {name: new[name] - w for name, w in server["weights"].items()}}


SOURCES = {NAME: TEXT, TREND: inspect.getsource(Trend)}


def build(
    network: Network, *, scale: float = 0.1, precision: float = 1e-3, local_optimiser: Optimiser = SGD
) -> Algorithm:
    return Algorithm(student_t()(scale=scale, precision=precision), {"weights": local_optimiser})


def build_trend(
    network: Network, *, precision: float = 0.1, share: float = 0.5, local_optimiser: Optimiser = SGD
) -> Algorithm:
    return Algorithm(Trend(precision, share), {"weights": local_optimiser})


ENTRIES = {
    NAME: Entry(build, "Student-t", "a mean that trusts near clients more"),
    TREND: Entry(build_trend, "Gaussian around the server's trend", "mean, and how far it moved"),
}
