"""BatchNorm's statistics as part of the model: what a client finds, what it reports, how the server combines it.

shared   they travel with the weights; the server pools what a cohort reports
local    each client keeps its own, as FedBN does; the server has none
batch    nothing is stored: predictions use the statistics of the current batch
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprior.core.batch_norm import COUNT, MEAN, Norm, joint, parted, pooled
from fedprior.core.errors import SettingError
from fedprior.core.inputs import as_inputs, joined, real_type
from fedprior.core.network import Network
from fedprior.core.trees import Gates, Params
from fedprior.em.batch import Batch, Batches, given
from fedprior.wire import Section

KINDS = ("shared", "local", "batch")
REPORTS = ("received", "running", "final")


@dataclass(frozen=True)
class Statistics:
    """How a run treats the statistics of its network's norms, if it has any."""

    kind: str = "shared"
    report: str = "received"
    """What a client reports: the statistics of the model it `received` or of its `final` one, each from a pass over
    its examples, or its `running` averages over the training."""
    momentum: float = 1.0
    """How far the server moves to a round's pooled statistics; 1 replaces its own."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingError(f"statistics must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {self.kind!r}")
        if self.report not in REPORTS:
            raise SettingError(
                f"report_statistics must be {', '.join(REPORTS[:-1])} or {REPORTS[-1]}, got {self.report!r}"
            )
        if not 0 < self.momentum <= 1:
            raise SettingError(f"statistics_momentum must be above 0 and at most 1, got {self.momentum}")


TOGETHER = 8
"""How many batches are measured as one: fewer passes, and closer to the statistics of all examples."""


def measure(network: Network, lift: Callable[..., Callable[..., Params]], params: Params, batches: Batches) -> Params:
    """The statistics of a model over a client's batches, and the number of examples."""
    one, steps, parts = lift(lambda _: partial(_of_several, network)), range(len(batches)), []
    with torch.no_grad():
        for first in steps[::TOGETHER]:
            chosen = [batches[step] for step in steps[first : first + TOGETHER]]
            parts.append(one(params, [given(x) | ({} if x.active is None else {"active": x.active}) for x in chosen]))
        mean, variance, count = (torch.stack([part[name] for part in parts]) for name in ("mean", "variance", COUNT))
        whole = pooled(mean, variance, count.to(mean.dtype).unsqueeze(-1))
    return {**parted(network.norms, *whole), COUNT: count.to(mean.dtype).sum(0)}


def _of_several(network: Network, params: Params, batches: list[dict[str, Any]]) -> Params:
    """Measure several batches of a client as one; batches after its last step do not count."""
    x, weight = joined([as_inputs(batch["x"]) for batch in batches]), None
    if any("weight" in batch or "active" in batch for batch in batches):
        weight = torch.cat([_weight(batch) for batch in batches])
    size = torch.full((), len(x), device=batches[0]["y"].device) if weight is None else weight.sum()
    return {**network.measure(params, x, weight), COUNT: size}


def _weight(batch: dict[str, Any]) -> Tensor:
    """The weight of each example: 0 if it is padding or the client has finished."""
    y = batch["y"]
    ones = torch.ones(len(y), dtype=real_type(as_inputs(batch["x"])), device=y.device)
    weight: Tensor = batch.get("weight", ones)
    return weight * batch["active"] if "active" in batch else weight


class Running:
    """Running averages over the steps of a turn, with each layer's own momentum."""

    def __init__(self, network: Network, start: Params) -> None:
        self.norms = network.norms
        self.mean, self.variance = joint(self.norms, start)
        self.steps, self.count = 0, torch.zeros_like(start[COUNT])
        self.unknown = (start[COUNT] == 0).unsqueeze(-1)
        """True if there is nothing to start from, so that the first batch counts in full."""

    def add(self, found: Params, batch: Batch) -> None:
        """Add the statistics of one step."""
        self.steps += 1
        active = batch.active
        whole = self.count.new_full(self.count.shape, batch.y.shape[self.count.dim()])
        size = whole if batch.weight is None else batch.weight.sum(-1).to(self.count.dtype)
        rates = [1 / self.steps if norm.momentum is None else norm.momentum for norm in self.norms]
        share = torch.cat([self.mean.new_full((n.size,), rate) for n, rate in zip(self.norms, rates, strict=True)])
        if self.steps == 1:
            share = torch.where(self.unknown, 1.0, share)
        if active is not None:
            share, size = share * active.to(share.dtype).unsqueeze(-1), size * active
        self.mean = torch.lerp(self.mean, found["mean"], share.expand_as(self.mean))
        self.variance = torch.lerp(self.variance, found["variance"], share.expand_as(self.variance))
        self.count = self.count + size

    def statistics(self) -> Params:
        """The current averages, and the number of examples."""
        return {**parted(self.norms, self.mean, self.variance), COUNT: self.count}


# ---------------------------------------------------------------------- in messages and at the server
def masked(statistics: Params, support: Params) -> Params:
    """Remove the rows of units that gates have closed: those of the norm's own scales."""
    return {
        name: value * support[owner] if (owner := _owner(name)) in support else value
        for name, value in statistics.items()
    }


def _owner(name: str) -> str:
    return name.rpartition(".")[0] + ".weight"


def section(statistics: Params, support: Callable[[Gates], Params], *, down: bool) -> Section:
    """How statistics travel: in full precision, because variances are divisors."""
    stacked = is_stacked(statistics)
    shapes = {
        name: tuple(value.shape if down or name == COUNT or not stacked else value.shape[1:])
        for name, value in statistics.items()
    }

    def mask(gates: Gates) -> Params:
        masks = support(gates) if gates else {}
        return {name: masks[_owner(name)] for name in shapes if _owner(name) in masks}

    return Section(shapes, mask, relative=False, precision="float32", models=int(down and stacked))


def is_stacked(statistics: Params) -> bool:
    """Whether these belong to several models, as at a mixture's server."""
    return next(iter(statistics.values())).dim() - statistics[COUNT].dim() > 1


def one_model(statistics: Params) -> Params:
    """The mean over several models."""
    if not is_stacked(statistics):
        return statistics
    return {name: value if name == COUNT else value.mean(-2) for name, value in statistics.items()}


def stacked(statistics: Params, models: int) -> Params:
    """Repeat the statistics for each of several models."""
    return {
        name: value if name == COUNT else value.expand(models, *value.shape).clone()
        for name, value in statistics.items()
    }


def without_count(statistics: Params) -> Params:
    """The statistics for which a module has buffers."""
    return {name: value for name, value in statistics.items() if name != COUNT}


def absorb(known: Params, reports: Params, weight: Params, shares: Tensor | None, momentum: float) -> Params:
    """The server's statistics after a cohort's stacked reports.

    A report counts by its number of examples. `weight` marks the rows that each client sent, if it did not send all,
    and `shares` says how much each of several models answers for a client. A row that no client sent does not change.
    """
    norms = _norms(known)
    mean, variance = joint(norms, reports)
    rows = [weight.get(_owner(norm.name), torch.ones_like(reports[norm.name + MEAN])) for norm in norms]
    count = torch.cat(rows, -1) * reports[COUNT].unsqueeze(-1)
    if shares is not None:
        mean, variance, count = mean.unsqueeze(1), variance.unsqueeze(1), count.unsqueeze(1) * shares.unsqueeze(-1)
    found, old, total = pooled(mean, variance, count), joint(norms, known), count.sum(0)
    rate = torch.where(known[COUNT] > 0, momentum, 1.0).to(mean.dtype)
    new = [
        torch.where(total > 0, before + rate * (now - before), before) for now, before in zip(found, old, strict=True)
    ]
    return {**parted(norms, *new), COUNT: reports[COUNT].sum(0)}


def _norms(statistics: Params) -> tuple[Norm, ...]:
    names = [name.removesuffix(MEAN) for name in statistics if name.endswith(MEAN)]
    return tuple(Norm(name, statistics[name + MEAN].shape[-1], None) for name in names)
