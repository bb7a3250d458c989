"""Spike and slab under a budget: FedNarrow, a narrower network of a size that the user chooses.

    z_g ∈ {0, 1} for all clients,   φ | z = 1 ~ N(w, 1/λ),   φ | z = 0 ~ δ(0),   size(z) ≤ budget

The gates are global, as in federated dropout, and the M-step assigns them: it keeps what costs the most to lose. A
unit's strength is the norm of the weights that make it times the norm of those that read it, which does not change when
a ReLU network is rescaled. Its share is its strength divided by that of its layer. Losing the unit changes the layer's
output by that share, and a loss near its minimum is quadratic, so

    z_g = 1  ⟺  share_g² > μ · (parameters that go with the unit)

with the price μ, the dual variable of the budget, as small as the budget allows. There is nothing to tune: the budget
determines the price, and units of any scale, from any initialisation, are compared within their own layer.

The kept units may be drawn, as in federated dropout. Then p(z_g = 1) is 0 or 1 − rate instead of 0 or 1, the server
draws a sub-network for each client, and it ships each unit scaled by the clients' average.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.priors.gated import GlobalGates
from fedprior.units import Gating
from fedprior.units.fit import fitted


@dataclass(frozen=True)
class Narrow(GlobalGates):
    """Gates that the server assigns such that the requested share of parameters is gone."""

    gating: Gating
    sparsity: float = 0.5
    """The effective share of parameters to remove: the weights that read a unit go with it."""
    precision: float = 0.0
    """λ: the pull of a client's weights towards the server's."""
    dense_rounds: int = 0
    """Rounds before the first gate closes."""
    shrink: float = 1.0
    """After them, the largest share of the network that one round may remove; 1 sets no limit."""
    conv_rate: float = 0.0
    linear_rate: float = 0.0
    """The probability that a kept filter or neuron is left out of a client's packet."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Whether each layer whose units are drawn has the rate of `conv` or `linear`; if empty, no unit is drawn."""
    yields: bool = False
    """Whether the user set neither `dense_rounds` nor `shrink`; a short run then closes gates earlier and faster."""
    scalars = ("sparsity", "precision", "shrink", "conv_rate", "linear_rate")

    def check(self) -> None:
        most = self.most_sparse()
        if not 0 <= self.sparsity <= most:
            bound = math.floor(1e4 * most) / 1e4
            raise SettingError(
                f"sparsity must lie between 0 and {bound:.4f}, which leaves each layer its floor of units"
            )
        if self.dense_rounds < 0:
            raise SettingError(f"dense_rounds must be at least 0, got {self.dense_rounds}")
        if not 0 < self.shrink <= 1:
            raise SettingError(f"shrink must be above 0 and at most 1, got {self.shrink}")
        for name, rate in (("conv_rate", self.conv_rate), ("linear_rate", self.linear_rate)):
            if not 0 <= rate < 1:
                raise SettingError(f"{name} must be at least 0 and below 1, got {rate}")
        super().check()

    def most_sparse(self) -> float:
        """The sparsity that can be reached with any weights: that of the largest network at the floor.

        Layers that are added need not keep the same channels; a reader of the sum then reads the channels of all.
        """
        shapes = {layer: torch.Size(shape) for layer, shape in self.gating.gate_shapes.items()}
        closed = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in shapes.items()}
        # First any units, all equally likely; then, layer by layer, those that add the most to the others.
        gates = {layer: gate + min(1.0, self.gating.least / gate.numel()) for layer, gate in closed.items()}
        for layer in gates:
            added = torch.func.grad(self.gating.effective_parameters)(gates)
            gates[layer] = self.gating.floor(closed, added)[0][layer]
        return 1 - float(self.gating.effective_parameters(gates)) / self.gating.parameters

    @property
    def final_size(self) -> float:
        """How many parameters may be left in the end."""
        return (1 - self.sparsity) * self.gating.parameters

    def fit(self, rounds: int) -> "Narrow":
        """If the run is too short for the size: dense for a quarter of the rounds, small after three quarters."""
        if not self.yields or self.settled(rounds):
            return self
        dense = min(self.dense_rounds, rounds // 4)
        closing = max(1, 3 * rounds // 4 - dense)
        # A little more than the root, whose power may stay above the goal by a rounding error.
        share = 1 - (1 - self.sparsity) ** (1 / closing) + 1e-9
        return replace(self, dense_rounds=dense, shrink=min(1.0, max(self.shrink, share)))

    def cautions(self, rounds: int) -> list[str]:
        if self.settled(rounds):
            return []
        number = next(n for n in itertools.count(rounds) if self.settled(n))
        return [
            f"sparsity {self.sparsity:g} would be met in round {number} with dense_rounds={self.dense_rounds} and "
            f"shrink={self.shrink:g}, but there are {rounds}: use more rounds, or leave both out"
        ]

    stride: ClassVar[int] = 1
    """How many rounds of its schedule may be foreseen as one."""

    def settled(self, round_number: int) -> bool:
        """Whether all later rounds have the same goal."""
        goal = (1 - self.shrink) ** max(0, round_number - self.dense_rounds)
        return goal <= 1 - self.sparsity

    # ------------------------------------------------------------------ the server
    def init(self, params: Params) -> Tree:
        gates = self.gating.all_open(params)
        if self.dense_rounds == 0 and self.shrink == 1:
            gates = self._at_once(params, gates)
        weights = self.gating.prune(params, gates)
        return {"weights": weights, "open": gates, "age": {"rounds": next(iter(gates.values())).new_zeros(())}}

    def _at_once(self, weights: Params, gates: Gates) -> Gates:
        """Close gates before the first round, a tenth of the network at a time.

        With every unit that goes, the shares of the remaining ones grow, so that no layer is emptied before the others
        lose any.
        """
        size = float(self.gating.effective_parameters(gates))
        while size > self.final_size:
            goal = torch.tensor(max(self.final_size, 0.9 * size), dtype=torch.float64)
            gates, _ = self.assign(self.gating.prune(weights, gates), gates, goal.to(next(iter(gates.values())).device))
            before, size = size, float(self.gating.effective_parameters(gates))
            if size == before:  # only the floor is left
                break
        return gates

    def prune(self, server: Tree) -> Tree:
        """Assign the gates of the next round, and remove what they close from the weights."""
        age = server["age"]["rounds"] + 1
        # An optimiser's momentum moves pruned weights.
        weights = self.gating.prune(server["weights"], server["open"])
        gates, floored = self.reassign(weights, server, self._goal(age))
        weights = self.gating.prune(weights, gates)
        return {**server, "weights": weights, "open": gates, "floored": floored, "age": {"rounds": age}}

    def reassign(self, weights: Params, server: Tree, goal: Tensor) -> tuple[Gates, Gates]:
        """The gates of the next round, and the layers where the floor acted."""
        return self.assign(weights, server["open"], goal)

    def _goal(self, age: Tensor) -> Tensor:
        """How many parameters the network may have in a round: a constant share goes per round until the target."""
        share = (1 - self.shrink) ** (age - self.dense_rounds).clamp(min=0)
        return share.clamp(min=1 - self.sparsity) * self.gating.parameters

    def assign(self, weights: Params, gates: Gates, goal: Tensor) -> tuple[Gates, Gates]:
        """Close the gates with the least worth per parameter until no more than `goal` parameters are left.

        This may close too few (`units/fit.py`), and the next round closes the rest.
        """
        return self.fitted(self.shares(weights), gates, goal)

    def fitted(self, shares: Gates, gates: Gates, goal: Tensor) -> tuple[Gates, Gates]:
        """The same, for shares that are known."""
        return fitted(self.gating, self.gating.join(shares) ** 2, gates, goal)

    def shares(self, weights: Params) -> Gates:
        """Every unit's share of its layer's strength."""
        return shares_of(self.gating.strengths(weights))

    def exposes(self) -> str:
        drawn = "every client has its own sub-network, so how many sent a weight shows who took part"
        return f"{drawn}; leave out conv_rate and linear_rate" if self.per_client else ""

    @property
    def per_client(self) -> bool:  # type: ignore[override]
        """If units are drawn, every client has its own network."""
        return bool(self.kinds)

    def rate(self, layer: str) -> float:
        kind = self.kinds.get(layer)
        return {"conv": self.conv_rate, "linear": self.linear_rate}[kind] if kind else 0.0

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        if self.per_client:
            return self.sub_network(server["weights"], server["open"], key)
        return {"weights": server["weights"], "gates": server["open"]}

    def predict(self, server: Tree) -> Params:
        """E[z] w: every unit, scaled by how often clients have it."""
        weights = self.gating.apply(self.gating.prune(server["weights"], server["open"]), self.gates(server))
        return {name: value.unsqueeze(0) for name, value in weights.items()}

    # ------------------------------------------------------------------ what the records say
    def gates(self, state: Tree) -> Gates:
        if "gates" in state:
            return state["gates"]
        return {layer: gate * (1 - self.rate(layer)) for layer, gate in state["open"].items()}

    def tally(self, server: Tree) -> dict[str, int]:
        return {f"units/{layer}": int((gate > 0).sum()) for layer, gate in server["open"].items()}

    def effective_parameters(self, server: Tree) -> int:
        return int(self.gating.effective_parameters(server["open"]))


def shares_of(values: Gates) -> Gates:
    """Every unit's share of its layer's. In a layer without any, such as one before a head of zeros, all are equal."""
    heard = {layer: torch.where(each.sum() > 0, each, torch.ones_like(each)) for layer, each in values.items()}
    return {layer: each / each.sum() for layer, each in heard.items()}
