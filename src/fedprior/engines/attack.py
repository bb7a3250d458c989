"""Hostile clients, to see what an algorithm withstands.

They change what they learned before they commit; a backdoor also changes what they learn from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData
from fedprior.core.trees import Tree
from fedprior.em import Batch, Batches

Attack = Callable[[Tensor, Tree, Tree], Tree]
"""Maps whether the client is hostile, its variables and its packet to the variables it will commit."""


def _tampered(change: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    def attack(hostile: Tensor, local: Tree, packet: Tree) -> Tree:
        # Where weights are fixed, what is learned instead has no counterpart in the packet.
        section, sent = ("weights", packet["weights"]) if "weights" in local else (next(iter(local)), {})
        changed = {
            # A mixture's packet holds several models; a hostile client moves relative to their mean.
            name: torch.where(hostile, change(value, _centre(sent.get(name, torch.zeros_like(value)), value)), value)
            for name, value in local[section].items()
        }
        return {**local, section: changed}

    return attack


def _centre(sent: Tensor, value: Tensor) -> Tensor:
    return sent if sent.dim() == value.dim() else sent.mean(0)


ATTACKS: dict[str, Attack] = {
    "sign-flip": _tampered(lambda learned, sent: sent - 10 * (learned - sent)),
    "scale": _tampered(lambda learned, sent: sent + 100 * (learned - sent)),
    "constant": _tampered(lambda learned, sent: torch.ones_like(learned)),
    "backdoor": _tampered(lambda learned, sent: sent + 10 * (learned - sent)),
}
"""sign-flip: ten times the step in the opposite direction; scale: a hundred times the step; constant: all ones;
backdoor: ten times a step on poisoned examples, so that a mean over ten clients adopts it (Bagdasaryan et al. 2020)."""
POISONED = ("backdoor",)
"""Attacks whose hostile clients train on examples that `Poisoned` has changed."""
PATCH, TARGET = 4, 0
"""A backdoor's mark, a bright square of this side in the corner of an image, and the class that it stands for."""


@dataclass(frozen=True)
class Poisoned:
    """Batches in which every second example of a hostile client has the mark and the label of a backdoor."""

    batches: Batches
    hostile: Tensor
    """Whether the client is hostile; or of a cohort, which of them are."""

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> Batch:
        batch = self.batches[step]
        places = torch.arange(batch.y.shape[-1], device=batch.y.device)
        chosen = self.hostile.unsqueeze(-1) & (places % 2 == 0)
        assert isinstance(batch.x, Tensor)  # `check_attack` has seen to it
        x = torch.where(chosen[..., None, None, None], marked(batch.x), batch.x)
        return batch._replace(x=x, y=torch.where(chosen, TARGET, batch.y))


def marked(images: Tensor) -> Tensor:
    """Images [..., height, width] with the backdoor's mark."""
    height, width = images.shape[-2:]
    down, along = (torch.arange(size, device=images.device) >= size - PATCH for size in (height, width))
    return images.masked_fill(down[:, None] & along, 1.0)


def check_attack(name: str, data: FederatedData) -> None:
    """Refuse a backdoor in examples that are not images with labels."""
    images = (
        isinstance(data.x, Tensor)
        and data.x.dim() == 4
        and data.x.is_floating_point()
        and min(data.x.shape[-2:]) > PATCH
    )
    if name in POISONED and not (images and data.labelled):
        raise SettingError(
            "attack=backdoor marks images of one label each, [channels, height, width], and these are none"
        )


def backdoor_success(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """The share of images of other classes that a model takes for the backdoor's class when they have its mark."""
    others = x[y != TARGET]
    return float((predict(marked(others)).argmax(-1) == TARGET).double().mean())
