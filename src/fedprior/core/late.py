"""The mean over a run's last evaluations.

A single round's accuracy depends on its cohort: on CIFAR10 it is off by up to 1.5 points either way, in the same
direction for all algorithms with the same seed. Tables therefore show the mean over the last 5% of the rounds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

SHARE = 0.05
MEANS = "Accuracies are means over the evaluations in the last 5% of rounds."
"""The note below a table of such means."""


def late(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a field over the evaluations in the last 5% of rounds, at least the last one; NaN if none exist.

    >>> late([{"round": r, "a": r} for r in range(1, 101)], "a")
    98.0
    """
    evaluated = [(r["round"], r[name]) for r in records if is_number(r.get(name))]
    if not evaluated:
        return math.nan
    after = (1 - SHARE) * len(records) + 1e-9  # round 95 of 100 is not among the last five
    values = [value for number, value in evaluated if number > after] or [evaluated[-1][1]]
    return float(sum(values) / len(values))


def is_number(value: Any, *, finite: bool = True) -> bool:
    """Whether something read from a record is a number; truth is none, nor is a whole number that no float holds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or (isinstance(value, int) and abs(value) > 2**63):
        return False
    return not finite or math.isfinite(value)
