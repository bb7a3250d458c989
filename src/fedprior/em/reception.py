"""What the server receives before it concludes: uploads much farther from its state than usual are left out.

    d_s       the distance of an upload from the server's state, over what was sent
    usual     the median over the last rounds of each round's median d. Until so many are known, the round's own median
              if it is larger, at most bound times: steps may grow several times between a run's first rounds
    kept_s    d_s ≤ bound · usual, for each section of the message: weights, control variates, statistics

Whoever is left out counts as if it had not answered: what remains is the cohort. Nothing waits for the device if the
runs are stacked; then an upload that is left out is replaced by one that is kept, and weighs nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedprior.core import trees
from fedprior.core.batch_norm import COUNT
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import Share, without_weight
from fedprior.em.algorithm import Algorithm
from fedprior.em.lifting import lifting
from fedprior.wire import Section

SECTION = "usual"
"""Where the server's state has the medians of the last rounds."""


class Reception(NamedTuple):
    """The uploads that count, and how far away each was."""

    usual: Params
    """The medians of the last rounds, with this one's."""
    uploads: Tree
    share: Share
    apart: Tensor
    """Each upload's distance as a multiple of the usual one; infinite if it is not finite."""
    kept: Tensor
    """Which uploads count."""


def receive(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree,
    share: Share,
    fine: Tensor,
    *,
    vectorised: bool = False,
    settings: Params | None = None,
) -> Reception:
    """Leave out the uploads of a cohort that are too far away. `fine` marks those without infinities.

    If vectorised, everything has a leading dimension of independent runs.
    """
    lift = lifting(algorithm, vectorised, settings)
    usual, apart = lift(_apart)(uploads, server, fine)
    kept = apart <= algorithm.bound
    if vectorised:
        uploads, share = _weightless(uploads, share, kept, not without_weight(algorithm.prior))
    elif not bool(kept.all()):
        uploads, share = _without(uploads, share, kept)
    return Reception(usual, uploads, share, apart, kept)


# ---------------------------------------------------------------------- how far away
def _apart(algorithm: Algorithm) -> Callable[[Tree, Tree, Tensor], tuple[Params, Tensor]]:
    """Maps a cohort's uploads to the new medians and to each distance as a multiple of the usual one."""

    def apart(uploads: Tree, server: Tree, fine: Tensor) -> tuple[Params, Tensor]:
        usual, farthest = Params(), torch.zeros(fine.shape, dtype=torch.float64, device=fine.device)
        for name, distance in distances(algorithm, uploads, server).items():
            before = server[SECTION][name]
            typical, middle = _usual(distance, before, fine, algorithm.bound)
            ratio = torch.where(typical > 0, distance / typical, 0.0)
            farthest = torch.maximum(farthest, ratio.nan_to_num(torch.inf, torch.inf))
            usual[name] = torch.cat([before[1:], middle])
        return usual, torch.where(fine, farthest, torch.inf)

    return apart


def distances(algorithm: Algorithm, uploads: Tree, server: Tree) -> Params:
    """The distance of each upload of a cohort from the server's state, for each section of the message."""
    layout = algorithm.uplink(server)

    def each(upload: Tree) -> Params:
        known = {name: gate for name, gate in upload.get("gates", {}).items() if name not in layout.marks}
        found = {}
        for name, section in layout.sections.items():
            left = section.support or section.mask
            found[name] = _distance(section, upload[name], server.get(name, {}), left(known) if left else {})
        return found

    return torch.func.vmap(each)(uploads)


def _distance(section: Section, sent: Params, known: Params, masks: Params) -> Tensor:
    """‖sent − known‖ over what the masks leave; ‖sent‖ if what is sent is a difference already or has no counterpart.

    From several models, as in a mixture, it is the distance to the nearest.
    """
    base = {name: known[name] for name in sent if section.relative and name in known}
    parts = []
    for names in _alike([name for name in sent if name != COUNT], sent, base, masks):
        first = names[0]
        apart = trees.joined_rows([sent[name] for name in names], 0)
        if first in base:
            apart = apart - trees.joined_rows([base[name] for name in names], base[first].dim() - sent[first].dim())
        if first in masks:
            closed = trees.joined_rows([masks[name].expand_as(sent[name]) for name in names], 0) <= 0
            apart = torch.where(closed, 0.0, apart)
        rows = apart if apart.dim() > 1 else apart.unsqueeze(0)
        parts.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    distance: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0).amin()
    return distance


def _alike(names: list[str], sent: Params, base: Params, masks: Params) -> list[list[str]]:
    """The names in groups whose distances are computed together; a large tensor is a group by itself."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        large = name if sent[name].numel() >= trees.SMALL else ""
        several = base[name].dim() - sent[name].dim() if name in base else -1
        groups.setdefault((large, several, name in masks, sent[name].dtype), []).append(name)
    return list(groups.values())


def _usual(distance: Tensor, before: Tensor, fine: Tensor, bound: float = 1.0) -> tuple[Tensor, Tensor]:
    """The usual distance, and the lower median of this cohort's; zero where nothing is known."""
    fine = fine & distance.isfinite()
    ordered = torch.where(fine, distance, torch.inf).sort().values
    middle = ordered.gather(0, ((fine.sum() - 1) // 2).clamp(min=0).reshape(1))
    middle = torch.where(middle.isfinite(), middle, 0.0)
    known, size = (before > 0).sum(), before.shape[0]
    place = (size - known + (known - 1) // 2).clamp(max=size - 1)  # zeros come first
    recent = before.sort().values.gather(0, place.reshape(1))
    young = torch.maximum(recent, torch.minimum(middle, bound * recent))
    typical = torch.where(known < size, young, recent)
    return torch.where(known > 0, typical, middle), middle


# ---------------------------------------------------------------------- one by one
SEVERAL = 3
"""Of so many uploads that arrive one by one, the lower median is not that of the farthest alone."""


def one_apart(algorithm: Algorithm, server: Tree, upload: Tree, earlier: dict[str, list[Tensor]]) -> float:
    """How far away an upload is that is judged as it arrives, as a multiple of the usual distance.

    In a run's first round, those before it say what is usual, and the very first is taken. In the next ones the round's
    own median counts once there are several, or else the first would be its own measure. The distance is added to
    `earlier`.
    """
    apart = 0.0
    for name, distance in distances(algorithm, trees.stack([upload]), server).items() if algorithm.bound else ():
        earlier.setdefault(name, []).append(distance[0])
        growth = algorithm.bound if len(earlier[name]) >= SEVERAL else 1.0
        typical, _ = _median(torch.stack(earlier[name]), server[SECTION][name], growth)
        ratio = float(distance[0] / typical) if float(typical) > 0 else 0.0
        apart = max(apart, ratio if math.isfinite(ratio) else math.inf)
    return apart


def after_all(server: Tree, distances: dict[str, list[Tensor]]) -> Params:
    """The medians of the last rounds, with that of a round whose uploads were judged one by one."""
    return {
        name: torch.cat([before[1:], _median(torch.stack(distances[name]), before)[1]])
        for name, before in server.get(SECTION, {}).items()
        if name in distances
    }


def _median(distances: Tensor, before: Tensor, bound: float = 1.0) -> tuple[Tensor, Tensor]:
    return _usual(distances, before, torch.ones_like(distances, dtype=torch.bool), bound)


# ---------------------------------------------------------------------- who counts
def _without(uploads: Tree, share: Share, kept: Tensor) -> tuple[Tree, Share]:
    """Only the rows that are kept, and their share."""
    weight = torch.ones_like(kept, dtype=torch.float64) if share.weight is None else share.weight
    left = float(weight[kept].sum() / weight.sum())
    counted = None if share.weight is None else share.weight[kept]
    return trees.tree_map(lambda leaf: leaf[kept], uploads), Share(share.fraction * left, counted)


def _weightless(uploads: Tree, share: Share, kept: Tensor, weighs: bool) -> tuple[Tree, Share]:
    """The same with as many rows as before, [runs, cohort, …]: those that are left out repeat one that is kept, with
    weight zero. A prior without weights counts that one again."""
    rows = torch.arange(kept.shape[0], device=kept.device).unsqueeze(1)
    own = torch.arange(kept.shape[1], device=kept.device)
    chosen = torch.where(kept, own, kept.to(torch.uint8).argmax(1, keepdim=True))
    uploads = trees.map_rows(lambda leaf: leaf[rows, chosen], 2, uploads)
    if COUNT in uploads.get("statistics", {}):
        reported = uploads["statistics"]
        uploads = {**uploads, "statistics": {**reported, COUNT: reported[COUNT] * kept}}
    weight = torch.ones_like(kept, dtype=torch.float64) if share.weight is None else share.weight
    counted = weight * kept
    fraction = share.fraction * (counted.sum(1) / weight.sum(1))
    return uploads, Share(fraction, counted) if weighs else share
