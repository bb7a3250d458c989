"""Find the best evaluation so far in a run's records, to decide when to stop and which model to keep.

Nothing else is remembered, so a resumed run decides exactly like an uninterrupted one.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData
from fedprior.core.metrics import blank_scores, local_scores, measures, of_clients, over_clients
from fedprior.core.network import Network
from fedprior.core.probabilities import PROBABILITIES
from fedprior.core.settings import Settings
from fedprior.em import Algorithm
from fedprior.engines.build import applied
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
        raise _no_field(by, [key for key, value in record.items() if isinstance(value, float) and "/" not in key])
    less = "loss" in name or "error" in name or name.partition("_")[2] in PROBABILITIES
    return name, -1.0 if by != name or less else 1.0


def _no_field(by: str, known: Sequence[str]) -> SettingError:
    return SettingError(f"by={by}: evaluations have no {by.removeprefix('-')}; they have {', '.join(known)}")


def check_by(settings: Settings, algorithm: Algorithm, network: Network, data: FederatedData) -> None:
    """Refuse, before anything is trained, a field that no evaluation will have.

    Only the records show which layers have fields of their own, and whether the round has those of `SOMETIMES`: `best`
    refuses these.
    """
    name = settings.by.removeprefix("-")
    if not (settings.patience or settings.keep == "best") or name in ("auto", *SOMETIMES) or "/" in name:
        return
    what = measures(network, data, settings.metrics)
    blank = blank_scores(what, 1)
    known = [*ALWAYS, *(f"global_{one}" for one in what.names), *local_scores(blank)]
    known += over_clients(of_clients(blank, {}))
    known += [f"{who}_{one}" for who in ("unseen", "newcomer") if settings.unseen for one in what.names]
    if name not in known and name not in _tallied(settings, algorithm, network):
        raise _no_field(settings.by, known)


ALWAYS = ("round", "bytes_up", "bytes_down", "train_loss", "sparsity")
SOMETIMES = ("epsilon", "clip", "tv_mean", "tv_max")


def _tallied(settings: Settings, algorithm: Algorithm, network: Network) -> list[str]:
    """What the prior itself counts, which for one of your own may be anything."""
    algorithm = applied(settings, algorithm)
    state = algorithm.init(network.params(), network.statistics())
    return list(algorithm.prior.tally(algorithm.prior.prune(state)))


def _or_worst(sign: float, value: Any) -> float:
    return sign * value if isinstance(value, int | float) and math.isfinite(value) else -math.inf
