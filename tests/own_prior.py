"""The prior of docs/new-prior.md, which the library does not have, as an algorithm with a name: for the contract."""

import re
from pathlib import Path
from typing import Any

from fedprior.catalogue.algorithms import SGD, Entry
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser
from fedprior.em import Algorithm

NAME = "student-t"
DOCUMENT = Path(__file__).parents[1] / "docs" / "new-prior.md"


def student_t() -> Any:
    """The class, from the document's own text."""
    namespace: dict[str, object] = {"__name__": "new_prior"}
    exec(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0], namespace)
    return namespace["StudentT"]


def build(
    network: Network, *, scale: float = 0.1, precision: float = 1e-3, local_optimiser: Optimiser = SGD
) -> Algorithm:
    return Algorithm(student_t()(scale=scale, precision=precision), {"weights": local_optimiser})


ENTRY = Entry(build, "Student-t", "a mean that trusts near clients more")
