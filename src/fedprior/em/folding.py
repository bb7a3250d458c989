"""The M-step of a cohort whose uploads arrive one by one: where it is made of sums, each is folded in and forgotten.

    closed form        Σ_s n_s of what an upload says: `Prior.evidence`, for a prior that is `additive`
    server optimiser   Σ_s n_s of its gradient of −log p(φ_s | server), whatever the prior
    corrections        Σ_s n_s of what they add to an upload

So a round needs the memory of one upload and of the sums, however many clients there are. Sums are in double precision:
the order of arrival and the number of clients change them in the last of 53 bits, of which single precision keeps 24.
The stacked M-step (`mstep.py`) adds in single precision, so the two differ in the last bits of that.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprior.core import trees
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.trees import Tree
from fedprior.em.algorithm import Algorithm
from fedprior.em.mstep import ascent, descend, settle
from fedprior.em.reception import Earlier
from fedprior.em.statistics import is_stacked
from fedprior.priors import Assignment

CHUNK = 2**20
"""How many numbers are made double at a time."""
REPORT = ("statistics", "gates")
"""What is kept of every upload if a network's norms have statistics, which are no sums and take little room."""


@dataclass
class Sums:
    """What the uploads of a round add up to so far. This is the one state here that changes in place."""

    total: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """In double precision."""
    types: dict[str, torch.dtype] = field(default_factory=dict)
    """By path, the precision of what was added."""
    weight: float = 0.0
    clients: int = 0
    reports: list[Tree] = field(default_factory=list)
    earlier: Earlier = field(default_factory=Earlier)
    """What tells how far the next upload may be from the server's state."""

    def mean(self, role: str) -> Tree:
        """Σ_s n_s x_s / Σ_s n_s of this role's sections, in the precision of the uploads; the sums are then gone."""
        chosen = [section for section in self.total if section.startswith(f"{role}/")]
        means: Tree = {}
        for section in chosen:
            sums, name = self.total.pop(section), section.removeprefix(f"{role}/")
            means[name] = {key: sums.pop(key).div_(self.weight).to(self.types[f"{section}/{key}"]) for key in [*sums]}
        return means


def obstacle(algorithm: Algorithm, server: Tree) -> str:
    """Why the M-step of this algorithm needs all uploads at once; empty if it can take them one by one."""
    if algorithm.server is None and not algorithm.prior.additive:
        return f"the M-step of {algorithm.name} in closed form is not made of sums"
    if algorithm.guard is not None:
        return "uploads are clipped together"
    if "statistics" in server and is_stacked(server["statistics"]):
        return "the statistics of several models are divided among the uploads"
    return ""


def fold(algorithm: Algorithm, server: Tree, sums: Sums, upload: Tree, weight: float = 1.0) -> None:
    """Add one client's upload, which counts `weight` times."""
    own = algorithm.prior.uplink(server).sections.keys() | set(REPORT)
    parts = {
        "prior": _evidence(algorithm, server, upload),
        "correction": {name: values for name, values in upload.items() if name not in own},
    }
    for role, sections in parts.items():
        for name, values in sections.items():
            total = sums.total.setdefault(f"{role}/{name}", {})
            for key, value in values.items():
                sums.types[f"{role}/{name}/{key}"] = value.dtype
                if key not in total:
                    total[key] = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
                _add(total[key], value, weight)
    if "statistics" in upload:
        sums.reports.append({name: upload[name] for name in REPORT if name in upload})
    sums.weight += weight
    sums.clients += 1


def _evidence(algorithm: Algorithm, server: Tree, upload: Tree) -> Tree:
    """What an upload says: its gradient in the variables of the server's optimisers, or its part of the closed form."""
    if algorithm.server is not None:
        variables = {section: server[section] for section in algorithm.server}
        return ascent(algorithm, variables, server, trees.stack([upload]))
    return algorithm.prior.evidence(Assignment.of(algorithm.prior.realise(upload, server), upload), server)


def _add(total: Tensor, value: Tensor, weight: float) -> None:
    """total += weight · value, without a second copy in double precision."""
    into, parts = total.view(-1), value.detach().reshape(-1)
    for first in range(0, into.numel(), CHUNK):
        into[first : first + CHUNK].add_(parts[first : first + CHUNK].double(), alpha=weight)


def m_step_folded(
    algorithm: Algorithm,
    server: Tree,
    sums: Sums,
    optimiser: TreeOptimiser | None,
    fraction: float | Tensor = 1.0,
    *,
    rate: float | Tensor = 1.0,
) -> Tree:
    """As `m_step` of the uploads that were folded in."""
    control = sums.mean("correction")
    absorbed = algorithm.correction.absorb(server, trees.stack([control]), fraction) if control else server
    if sums.reports:
        absorbed = algorithm.absorb(absorbed, trees.stack(sums.reports))
    found = sums.mean("prior")
    if optimiser is None:
        solved = algorithm.prior.conclude(found, absorbed, sums.clients)
        return settle(algorithm, absorbed, solved, solved=True)
    return descend(algorithm, absorbed, found, optimiser, rate)
