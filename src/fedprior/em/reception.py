"""What the server receives before it concludes: uploads much farther from its state than usual are left out.

    d_s       the distance of an upload from the server's state, over what was sent
    usual     the median over the last rounds of each round's median d. Until so many are known, the round's own median
              if it is larger, at most bound times: steps may grow several times between a run's first rounds. Of three
              or more uploads, at most the larger of this round's median and the last one's: steps shrink as well
    kept_s    d_s ≤ bound · usual, for each section of the message: weights, control variates, statistics

In weights, d_s counts two and a half times if the step clearly points against those of the S − 1 ≥ 4 others:

    Σ_{t≠s} cos(φ_s − w, φ_t − w) < −0.3 √(S − 1)

Whoever is left out counts as if it had not answered: what remains is the cohort. Nothing waits for the device if the
runs are stacked; then an upload that is left out is replaced by one that is kept, and weighs nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedprior.core import trees
from fedprior.core.batch_norm import COUNT
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import Share, without_weight
from fedprior.em.algorithm import Algorithm
from fedprior.em.lifting import lifting

SECTION = "usual"
"""Where the server's state has the medians of the last rounds."""
STEP = "weights"
"""The section in which a step's direction counts."""
AGAINST = 2.5
"""How many times the distance of a step counts that points against those of the others."""
CLEARLY = 0.3
"""How negative the sum of a step's cosines with n others must be, over √n: the length of a sum of n steps of length one
that have nothing in common. Late in a run few honest steps have much in common."""
SEVERAL = 3
"""Of so many uploads, the lower median is not that of the farthest alone."""
TINY = torch.finfo(torch.float32).tiny
"""The length of a step that has no direction: one over it is too large for a number."""
TELLING = 5
"""So many uploads can say that one of them points back. In fewer, an honest one does so by chance."""


class Reception(NamedTuple):
    """The uploads that count, and how far away each was."""

    usual: Params
    """The medians of the last rounds, with this one's."""
    uploads: Tree
    share: Share
    apart: Tensor
    """Each upload's distance as a multiple of the usual one, as it counts; infinite if it is not finite."""
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
        found, products = distances(algorithm, uploads, server)
        for name, distance in found.items():
            before = server[SECTION][name]
            typical, middle = _usual(distance, before, fine, algorithm.bound)
            ratio = torch.where(typical > 0, distance / typical, 0.0)
            if name == STEP and products is not None:
                ratio = ratio * torch.where(_against(products, distance, fine), AGAINST, 1.0)
            farthest = torch.maximum(farthest, ratio.nan_to_num(torch.inf, torch.inf))
            usual[name] = torch.cat([before[1:], middle])
        return usual, torch.where(fine, farthest, torch.inf)

    return apart


def _against(products: Tensor, distance: Tensor, fine: Tensor) -> Tensor:
    """Which steps point against those of the others, each of which counts alike, however long it is. Who is not fine
    says nothing."""
    others = torch.where(fine, (products / distance).nan_to_num(0.0, 0.0, 0.0), 0.0)
    along, count = others.sum(1), fine.sum()  # with its own, which is its distance
    clear = along < distance * (1 - CLEARLY * (count - 1).clamp(min=0).sqrt())
    return clear & (count >= TELLING)


def distances(algorithm: Algorithm, uploads: Tree, server: Tree) -> tuple[Params, Tensor | None]:
    """The distance of each upload of a cohort from the server's state, for each section of the message; and the inner
    products of their steps, if these are steps of one model and there are enough to tell a direction.

    ‖sent − known‖ over what the masks leave; ‖sent‖ if what is sent is a difference already or has no counterpart.
    From several models, as in a mixture, it is the distance to the nearest.
    """
    found, products = Params(), []
    for name in algorithm.uplink(server).sections:
        parts = []
        for step in _steps(algorithm, name, uploads, server):
            parts.append(torch.linalg.vector_norm(step, dim=2, dtype=torch.float64))
            if name == STEP and step.shape[1] == 1 and len(step) >= TELLING:
                products.append(step[:, 0] @ step[:, 0].T)
        found[name] = torch.linalg.vector_norm(torch.stack(parts), dim=0).amin(1)
    return found, torch.stack(products).sum(0) if products else None


def _steps(algorithm: Algorithm, name: str, uploads: Tree, server: Tree) -> Iterator[Tensor]:
    """A section of a cohort's uploads less what the server knows, where it was sent, [cohort, models, numbers]: some
    tensors at a time, because all at once would double the memory of a round."""
    layout, sent, known = algorithm.uplink(server), uploads[name], server.get(name, {})
    section = layout.sections[name]
    left = section.support or section.mask
    own = {layer: gate for layer, gate in uploads.get("gates", {}).items() if layer not in layout.marks}
    masks = torch.func.vmap(left)(own) if left and own else Params()
    base = {name: known[name] for name in sent if section.relative and name in known}
    for names in _alike([name for name in sent if name != COUNT], sent, base, masks):
        first = names[0]
        step = trees.joined_rows([sent[name] for name in names], 1).unsqueeze(1)
        if first in base:
            step = step - trees.joined_rows([base[name] for name in names], base[first].dim() + 1 - sent[first].dim())
        if first in masks:
            closed = trees.joined_rows([masks[name].expand_as(sent[name]) for name in names], 1) <= 0
            step = torch.where(closed.unsqueeze(1), 0.0, step)
        yield step


def _alike(names: list[str], sent: Params, base: Params, masks: Params) -> list[list[str]]:
    """The names in groups whose distances are computed together; a large tensor is a group by itself."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        large = name if sent[name][0].numel() >= trees.SMALL else ""
        several = base[name].dim() + 1 - sent[name].dim() if name in base else -1
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
    shrunk = torch.maximum(before[-1:], middle)
    if distance.shape[0] >= SEVERAL:
        typical = torch.where(shrunk > 0, torch.minimum(typical, shrunk), typical)
    return torch.where(known > 0, typical, middle), middle


# ---------------------------------------------------------------------- one by one
@dataclass
class Earlier:
    """What is kept of the uploads that a round has received so far, also of those that were left out."""

    distances: dict[str, list[Tensor]] = field(default_factory=dict)
    """How far each was from the server's state, by section."""
    heading: list[Tensor] = field(default_factory=list)
    """Σ_t (φ_t − w) / d_t, some tensors at a time."""


def one_apart(algorithm: Algorithm, server: Tree, upload: Tree, earlier: Earlier) -> float:
    """How far away an upload is that is judged as it arrives, as a multiple of the usual distance.

    In a run's first round, those before it say what is usual, and the very first is taken. In the next ones the round's
    own median counts once there are several, or else the first would be its own measure; and so does the direction of
    those before it. The upload is added to them.
    """
    apart, alone = 0.0, trees.stack([upload])
    for name, distance in distances(algorithm, alone, server)[0].items() if algorithm.bound else ():
        known = earlier.distances.setdefault(name, [])
        known.append(distance[0])
        far, count = float(distance), sum(math.isfinite(one) for one in known)
        several = count >= SEVERAL
        typical, _ = _median(torch.stack(known), server[SECTION][name], algorithm.bound if several else 1.0)
        ratio = far / float(typical) if float(typical) > 0 else 0.0
        if name == STEP:
            along = _turn(earlier.heading, _steps(algorithm, name, alone, server), far)
            clear = count >= TELLING and along < -CLEARLY * far * math.sqrt(count - 1)
            ratio *= AGAINST if clear else 1.0
        apart = max(apart, ratio if math.isfinite(ratio) else math.inf)
    return apart


def _turn(heading: list[Tensor], steps: Iterator[Tensor], distance: float) -> float:
    """⟨φ − w, heading⟩ of one upload, which is then added to the heading; 0 if its server has several models."""
    along = 0.0
    for place, step in enumerate(steps if TINY < distance < math.inf else ()):
        if step.shape[1] > 1:
            break
        row = step[0, 0]
        if place == len(heading):
            heading.append(torch.zeros_like(row))
        along += float(row @ heading[place])
        heading[place].add_(row, alpha=1 / distance)
    return along


def after_all(server: Tree, earlier: Earlier) -> Params:
    """The medians of the last rounds, with that of a round whose uploads were judged one by one."""
    return {
        name: torch.cat([before[1:], _median(torch.stack(earlier.distances[name]), before)[1]])
        for name, before in server.get(SECTION, {}).items()
        if name in earlier.distances
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
