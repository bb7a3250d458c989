"""Top-K with error feedback (Stich et al. 2018): a client sends the few entries that changed the most.

    meant    d_s = φ_s − w + e_s
    sent     the K largest of |d_s|, rounded as the wire says
    kept     e_s⁺ = d_s − what was sent

What is not sent is not lost: it is added to what the client means to send at its next turn, as is what rounding
changed. The server hears w plus what was sent, so this composes with every prior. Packets are not made smaller.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.corrections.base import Correction
from fedprior.wire import Layout

MARK = "sent/"
"""Precedes a parameter's name in the gates of a message: which of its entries travel."""


@dataclass(frozen=True)
class TopK(Correction):
    """A memory per client of what it has not said yet."""

    share: float = 0.01
    """K as a share of all entries."""
    differences = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SettingError(f"top_k must be above 0 and at most 1, got {self.share}")

    def remember(self, weights: Params) -> Tree:
        return {"error": {name: value.new_zeros(value.shape) for name, value in weights.items()}}

    def prepare(self, upload: Tree, packet: Tree, memory: Tree, support: Params) -> Tree:
        """Add the memory to the entries that the prior would send, and mark those that travel."""
        meant, waiting, changes = {}, {}, {}
        for name, value in upload["weights"].items():
            error, mask = memory["error"][name], support.get(name, torch.ones((), device=value.device))
            base = packet["weights"][name]
            base = base if base.dim() == value.dim() else base.mean(0)  # a mixture's packet holds several models
            meant[name] = torch.where(mask > 0, value + error, value)
            waiting[name] = torch.where(mask > 0, 0.0, error)
            changes[name] = torch.where(mask > 0, (meant[name] - base).abs(), 0.0)
        marks = {MARK + name: mark for name, mark in self.largest(changes).items()}
        return {**upload, "weights": meant, "gates": {**upload.get("gates", {}), **marks}, "error": waiting}

    def largest(self, changes: Params) -> Params:
        """Mark the K largest entries of all tensors together; zeros are never among them."""
        joint = torch.cat([change.reshape(-1) for change in changes.values()])
        count = max(1, round(self.share * joint.numel()))
        least = joint.topk(count).values[-1]
        return {name: ((change >= least) & (change > 0)).to(change.dtype) for name, change in changes.items()}

    def keep(self, memory: Tree, sent: Tree, meant: Tree) -> Tree:
        """What was meant and not sent."""
        if "error" not in meant:
            return memory
        pairs = meant["error"].items()
        return {"error": {name: e + (meant["weights"][name] - sent["weights"][name]) for name, e in pairs}}

    def thin(self, layout: Layout) -> Layout:
        section = layout.sections["weights"]
        own = section.mask or _everything

        def mask(gates: Gates) -> Params:
            """Both: part of what the prior sends, and marked."""
            left = own({name: gate for name, gate in gates.items() if not name.startswith(MARK)})
            return {name: _both(gates[MARK + name], left.get(name)) for name in section.shapes}

        marks = {MARK + name: shape for name, shape in section.shapes.items()}
        thinned = replace(section, mask=mask, support=own)
        sections, gates = {**layout.sections, "weights": thinned}, {**layout.gates, **marks}
        return replace(layout, sections=sections, gates=gates, marks=tuple(marks), masked=True)


def _everything(gates: Gates) -> Params:
    return {}


def _both(mark: Tensor, mask: Tensor | None) -> Tensor:
    return mark if mask is None else mark * (mask > 0)
