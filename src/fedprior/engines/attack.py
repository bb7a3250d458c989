"""Hostile clients, to see what an algorithm withstands. They change what they learned before they commit."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedprior.core.trees import Tree

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
}
"""sign-flip: ten times the step in the opposite direction; scale: a hundred times the step; constant: all ones."""
