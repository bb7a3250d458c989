"""Spike and slab under a budget: FedNarrow, a narrower network of a size that the user names.

    z_g ∈ {0, 1} for all clients,   φ | z = 1 ~ N(w, 1/λ),   φ | z = 0 ~ δ(0),   size(z) ≤ budget

The gates are global, as in federated dropout, and the M-step assigns them: it keeps what costs the most to lose. A
unit's strength is the norm of the weights that make it times the norm of those that read it, which does not change when
a ReLU network is rescaled; its share is its strength over that of its layer. Losing the unit moves what the layer says
by that share, and a loss near its minimum is quadratic, so

    z_g = 1  ⟺  share_g² > μ · (parameters that go with the unit)

with the price μ, the dual variable of the budget, as small as the budget allows. There is nothing to tune: the budget
says where the price stands, and units of any scale, from any initialisation, are compared within their own layer.

What is kept may be drawn, as in federated dropout: then p(z_g = 1) is 0 or 1 − rate instead of 0 or 1, the server draws
a sub-network for each client, and the network that it ships has of each unit what the clients had on average.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.priors.gated import GlobalGates
from fedprior.units import Gating


@dataclass(frozen=True)
class Narrow(GlobalGates):
    """Gates that the server assigns, so many that the asked share of parameters is gone."""

    gating: Gating
    sparsity: float = 0.5
    """The share of parameters to be rid of, effective: with a unit go the weights that read it."""
    precision: float = 0.0
    """λ: the pull of a client's weights towards the server's."""
    dense_rounds: int = 0
    """Rounds before the first gate closes."""
    shrink: float = 1.0
    """After them, the share of the network that goes in a round at most; 1: all that is to go."""
    conv_rate: float = 0.0
    linear_rate: float = 0.0
    """How often a filter or neuron that is kept is left out of what a client is sent."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Of each layer whose units are drawn, whether its rate is that of `conv` or `linear`; none: no unit is drawn."""
    yields: bool = False
    """Whether the two above are nobody's wish: then a run of few rounds closes gates earlier and faster."""
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
        """The sparsity that is reached whatever the weights: that of the largest network at the floor.

        Layers that are added up need not keep the same channels, and who reads the sum then hears the channels of all.
        """
        shapes = {layer: torch.Size(shape) for layer, shape in self.gating.gate_shapes.items()}
        closed = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in shapes.items()}
        # First any units, each as likely; then layer by layer those that add the most to what the others have.
        gates = {layer: gate + min(1.0, self.gating.least / gate.numel()) for layer, gate in closed.items()}
        for layer in gates:
            added = torch.func.grad(self.gating.effective_parameters)(gates)
            gates[layer] = self.gating.floor(closed, added)[0][layer]
        return 1 - float(self.gating.effective_parameters(gates)) / self.gating.parameters

    @property
    def final_size(self) -> float:
        """How many parameters there may be in the end."""
        return (1 - self.sparsity) * self.gating.parameters

    def fit(self, rounds: int) -> "Narrow":
        """Where the size would not be met: dense for a quarter of the rounds, and small after three quarters."""
        if not self.yields or self.settled(rounds):
            return self
        dense = min(self.dense_rounds, rounds // 4)
        closing = max(1, 3 * rounds // 4 - dense)
        # A little more than the root, which times itself may stay above by a rounding error.
        share = 1 - (1 - self.sparsity) ** (1 / closing) + 1e-9
        return replace(self, dense_rounds=dense, shrink=min(1.0, max(self.shrink, share)))

    def cautions(self, rounds: int) -> list[str]:
        if self.settled(rounds):
            return []
        number = next(n for n in itertools.count(rounds) if self.settled(n))
        return [
            f"sparsity {self.sparsity:g} would be met in round {number} with dense_rounds={self.dense_rounds} and "
            f"shrink={self.shrink:g}, but there are {rounds}: have more rounds, or leave both out"
        ]

    def settled(self, round_number: int) -> bool:
        """Whether the goal of a round is that of all later ones."""
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
        """Close what is to go before the first round, a tenth of the network at a time.

        With every unit that goes those that stay have a larger share, so that no layer is emptied before the others are
        touched.
        """
        size = float(self.gating.effective_parameters(gates))
        while size > self.final_size:
            goal = torch.tensor(max(self.final_size, 0.9 * size), dtype=torch.float64)
            gates, _ = self.assign(self.gating.prune(weights, gates), gates, goal.to(next(iter(gates.values())).device))
            before, size = size, float(self.gating.effective_parameters(gates))
            if size == before:  # what is left is the floor's
                break
        return gates

    def prune(self, server: Tree) -> Tree:
        """Assign the gates of the next round, and take what they close out of the weights."""
        age = server["age"]["rounds"] + 1
        # An optimiser's momentum moves what was pruned.
        weights = self.gating.prune(server["weights"], server["open"])
        gates, floored = self.assign(weights, server["open"], self._goal(age))
        weights = self.gating.prune(weights, gates)
        return {**server, "weights": weights, "open": gates, "floored": floored, "age": {"rounds": age}}

    def _goal(self, age: Tensor) -> Tensor:
        """How many parameters the network may have in a round: the target, reached by a constant share a round."""
        share = (1 - self.shrink) ** (age - self.dense_rounds).clamp(min=0)
        return share.clamp(min=1 - self.sparsity) * self.gating.parameters

    def assign(self, weights: Params, gates: Gates, goal: Tensor) -> tuple[Gates, Gates]:
        """Close the gates of the least worth a parameter until no more than `goal` are left.

        What goes with a unit is counted as if it alone went. Two that go together share some weights, so this closes
        too few rather than too many, and the next round closes the rest.
        """
        costs, size = torch.func.grad_and_value(self.gating.effective_parameters)(gates)
        cost, is_open = self.gating.join(costs), self.gating.join(gates) > 0
        worth = self.gating.join(self.shares(weights)) ** 2 / cost.clamp(min=1)
        # The floor's units are not for sale: closed and opened again, they would be counted as gone.
        scores = self.gating.part(torch.where(is_open, worth, -1.0))
        kept, _ = self.gating.floor({layer: torch.zeros_like(gate) for layer, gate in gates.items()}, scores)
        worth = torch.where(is_open & (self.gating.join(kept) == 0), worth, torch.inf)
        order = worth.argsort(stable=True)  # units of the same worth go in their order, on any device
        gone = torch.where(is_open, cost, 0.0)[order].double()
        closes = gone.cumsum(0) - gone < size - goal
        left = torch.zeros_like(cost).scatter(0, order, (~closes).to(cost.dtype)) * is_open
        return self.gating.floor(self.gating.part(torch.maximum(left, self.gating.join(kept) * is_open)), scores)

    def shares(self, weights: Params) -> Gates:
        """The share that every unit has in the strength of its layer."""
        strengths = self.gating.strengths(weights)
        # A layer that nothing is heard of yet, such as one before a head of zeros: its units are alike.
        heard = {layer: torch.where(s.sum() > 0, s, torch.ones_like(s)) for layer, s in strengths.items()}
        return {layer: s / s.sum() for layer, s in heard.items()}

    @property
    def per_client(self) -> bool:  # type: ignore[override]
        """Where units are drawn every client has a network of its own."""
        return bool(self.kinds)

    def rate(self, layer: str) -> float:
        kind = self.kinds.get(layer)
        return {"conv": self.conv_rate, "linear": self.linear_rate}[kind] if kind else 0.0

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        if self.per_client:
            return self.sub_network(server["weights"], server["open"], key)
        return {"weights": server["weights"], "gates": server["open"]}

    def predict(self, server: Tree) -> Params:
        """E[z] w: of every unit what the clients have of it on average."""
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
