"""Fixed gates: federated dropout (Caldas et al. 2018).

This is the hierarchical spike-and-slab model with fixed gate probabilities and global gates. The server draws a
sub-network for each client, and both sides send only that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Params, Tree
from fedprior.priors.base import Assignment
from fedprior.priors.gated import GlobalGates
from fedprior.units import Gating


@dataclass(frozen=True)
class FixedGates(GlobalGates):
    """Bern(1 − rate) gates, with one rate per layer, drawn anew for each client and round."""

    gating: Gating
    rates: Mapping[str, float]
    precision: float = 0.0
    noise: bool = False
    """Whether clients use dropout as well, at the same rates, drawn at every local step."""
    per_client = True
    scalars = ("precision",)

    def exposes(self) -> str:
        return "every client has its own sub-network, so how many sent a weight shows who took part"

    def check(self) -> None:
        for layer, rate in self.rates.items():
            if not 0 <= rate < 1:
                raise SettingError(f"the dropout rate of {layer} must be at least 0 and below 1, got {rate}")
        super().check()

    def rate(self, layer: str) -> float:
        return self.rates[layer]

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        """Draw a sub-network for one client."""
        return self.sub_network(server["weights"], self.gating.all_open(server["weights"]), key)

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        if not self.noise:
            return super().relax(expected, packet, key)
        drawn, _ = self.draw(packet["gates"], key)
        kept = {layer: gate / (1 - self.rates[layer]) for layer, gate in drawn.items()}
        return self.gating.apply(expected.weights, kept)
