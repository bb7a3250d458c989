"""SCAFFOLD (Karimireddy et al. 2020), option II: control variates against client drift.

    local step    φ ← φ − η (g + c − c_s)
    client        c_s⁺ = c_s − c + (w − φ*) / (K η),   sends c_s⁺ − c_s
    server        c ← c + Σ_s p_s (c_s⁺ − c_s),   p_s = 1/N, or n_s of all clients' examples

c stays Σ_s p_s c_s. At the end of training all clients stand where it is zero, which is the minimum of the objective
that the M-step weighs by the same p_s.

K η is how far K steps descend a slope of one; momentum in the local optimiser makes it larger.
The control variates travel with the weights and double the size of a message.
"""

from dataclasses import replace

from torch import Tensor

from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import mean
from fedprior.corrections.base import Correction, Support
from fedprior.wire import Layout, Section

NEGLIGIBLE = 2.0**-16
"""When messages carry whole numbers, a unit below this share of its tensor's largest number is sent as zeros. A unit
that stayed silent should send zero, but rounding leaves about ε |w| / (K η), which would need its own scale and codes.
No error accumulates: the next change is measured from the c_s that was kept."""


class Scaffold(Correction):
    """Control variates for the weights, whatever the prior."""

    def init(self, weights: Params) -> Tree:
        return {"control": _zeros(weights)}

    def remember(self, weights: Params) -> Tree:
        return {"control": _zeros(weights)}

    def broadcast(self, server: Tree) -> Tree:
        return {"control": server["control"]}

    def direction(self, packet: Tree, memory: Tree, support: Params) -> Params:
        """c − c_s, for the weights that the client received; its memory may hold others."""
        return {name: (c - memory["control"][name]) * support.get(name, 1.0) for name, c in packet["control"].items()}

    def conclude(self, start: Params, end: Params, packet: Tree, scale: Tensor) -> Tree:
        change = {name: (start[name] - end[name]) / scale.to(c.dtype) - c for name, c in packet["control"].items()}
        return {"control": change}

    def keep(self, memory: Tree, sent: Tree, meant: Tree) -> Tree:
        """c_s⁺ = c_s + what was sent, so that c stays the mean of all c_s even if gates hold something back."""
        return {"control": {name: value + sent["control"][name] for name, value in memory["control"].items()}}

    def absorb(self, server: Tree, uploads: Tree, fraction: float | Tensor, weight: Tensor | None = None) -> Tree:
        control = {}
        for name, value in uploads["control"].items():
            part = fraction.to(value.dtype) if isinstance(fraction, Tensor) else fraction
            control[name] = server["control"][name] + part * mean(value, weight)
        return {**server, "control": control}

    def extend(self, layout: Layout, server: Tree, support: Support) -> Layout:
        shapes = {name: tuple(value.shape) for name, value in server["control"].items()}
        control = Section(shapes, support, relative=False, negligible=NEGLIGIBLE)
        return replace(layout, sections={**layout.sections, "control": control})


def _zeros(weights: Params) -> Params:
    return {name: value.new_zeros(value.shape) for name, value in weights.items()}
