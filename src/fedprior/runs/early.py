"""Find the best evaluation so far in a run's records, to decide when to stop and which model to keep.

Nothing else is remembered, so a resumed run decides exactly like an uninterrupted one.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from fedprior.core.errors import SettingError
from fedprior.core.probabilities import PROBABILITIES
from fedprior.engines.server_state import Record


class Stop(Enum):
    """What `progress` returns to end a run after the current round."""

    STOP = "stop"


STOP = Stop.STOP


class Best(NamedTuple):
    """The best evaluation; of equal ones, the earliest."""

    name: str
    round: int
    value: float
    since: int
    """The number of evaluations after it."""


def best(records: Sequence[Record], by: str) -> Best | None:
    """The best by a field of the records, or None before the first evaluation. NaN is never the best."""
    evaluated = [record for record in records if "sparsity" in record]
    if not evaluated:
        return None
    name, sign = _field(evaluated[0], by)
    values = [_or_worst(sign, record.get(name)) for record in evaluated]
    place = values.index(max(values))
    return Best(name, evaluated[place]["round"], sign * values[place], len(values) - 1 - place)


def _field(record: Record, by: str) -> tuple[str, float]:
    """The field's name, and −1 if less is better: for losses, errors and scores of probabilities, and for `-NAME`."""
    if by == "auto":
        by = "global_accuracy" if record.get("global_accuracy") is not None else "global_loss"
    name = by.removeprefix("-")
    if name not in record:
        numbers = [key for key, value in record.items() if isinstance(value, float) and "/" not in key]
        raise SettingError(f"by={by}: evaluations have no {name}; they have {', '.join(numbers)}")
    less = "loss" in name or "error" in name or name.partition("_")[2] in PROBABILITIES
    return name, -1.0 if by != name or less else 1.0


def _or_worst(sign: float, value: Any) -> float:
    return sign * value if isinstance(value, int | float) and math.isfinite(value) else -math.inf
