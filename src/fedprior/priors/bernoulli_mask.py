"""Masks over fixed random weights: FedPM (Isik et al. 2023), a spike and slab whose slab is known to all.

    z_j ~ Bern(θ_j),   φ_j | z_j = 1 = w̄_j,   φ_j | z_j = 0 = 0,   w̄_j = ± 2 / √fan-in by the signs of a seed

The server owns θ. A client starts at log-odds s_s = logit θ and descends loss(w̄ ⊙ z) with z ~ Bern(σ(s_s)) at every
step, whose gradient passes straight through the draw to σ(s_s). It sends one draw, and θ is what the clients voted
for. Weights never travel: everybody makes them from the seed. Nor do biases and the scales of norms, which stay as
they begin.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.core.weighting import mean
from fedprior.priors.base import Assignment, Explain, Prior
from fedprior.priors.gated import joint_draws
from fedprior.units import WeightGating
from fedprior.units.positions import lasting
from fedprior.wire import Layout, Section

MODELS = ("mean", "mode")


@dataclass(frozen=True)
class Slab:
    """Fixed weights from a seed, made once for every device and precision."""

    shapes: Mapping[str, tuple[int, ...]]
    seed: int = 0
    _made: dict[tuple[torch.dtype, torch.device], Params] = field(default_factory=dict, repr=False, compare=False)

    def on(self, like: Tensor) -> Params:
        """The weights in the type and on the device of a tensor."""
        place = (like.dtype, like.device)
        if place not in self._made:
            with lasting():
                self._made[place] = {name: self._make(i, name, like) for i, name in enumerate(self.shapes)}
        return self._made[place]

    def _make(self, number: int, name: str, like: Tensor) -> Tensor:
        shape = self.shapes[name]
        if len(shape) < 2:  # a bias begins at 0, a norm's scale at 1
            return torch.full(shape, float(name.endswith("weight")), dtype=like.dtype, device=like.device)
        # Half of the weights are there at the start, so their variance is twice that of a dense layer's.
        size = 2 / math.sqrt(math.prod(shape[1:]))
        draws = keys.uniform(keys.fold(keys.key(self.seed, like.device), number), shape, like.dtype)
        return size * (1 - 2 * (draws < 0.5).to(like.dtype))


@dataclass(frozen=True)
class BernoulliMask(Prior):
    """Bern(θ) over every weight of the slab."""

    gating: WeightGating
    slab: Slab
    cross_entropy: float = 0.0
    """κ: how strongly θ pulls a client's probabilities; FedPM has no such term."""
    pseudo_votes: float = 1.0
    """How many undecided clients vote as well: θ stays away from 0 and 1, where nothing is learned."""
    model: str = "mean"
    """Which network the server ships: `mean`, every weight times θ, or `mode`, those with θ above a half."""
    scalars = ("cross_entropy", "pseudo_votes")

    def check(self) -> None:
        if self.model not in MODELS:
            raise SettingError(f"model must be {' or '.join(MODELS)}, got {self.model!r}")
        if not self.pseudo_votes > 0:
            raise SettingError(f"pseudo_votes must be above 0, got {self.pseudo_votes}")
        super().check()

    # ------------------------------------------------------------------ the density
    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """Σ_j z_j log θ_j + (1 − z_j) log(1 − θ_j), written as z ℓ − log(1 + e^ℓ)."""
        logits = self._logits(server)
        return (self.gating.join(assignment.gates) * logits - F.softplus(logits)).sum()

    def temper(self) -> Mapping[str, float]:
        return {"density": self.cross_entropy}

    def _logits(self, state: Tree) -> Tensor:
        """logit θ of all weights in one vector. Rounding may have moved θ to 0 or 1."""
        theta = self.gating.join(self.gates(state))
        return theta.clamp(EDGE, 1 - EDGE).logit()

    # ------------------------------------------------------------------ the server
    def init(self, params: Params) -> Tree:
        """θ = ½ everywhere. It is kept, and sent, as 2θ − 1, because the wire's whole numbers are centred at 0."""
        slab = self.slab.on(next(iter(params.values())))
        return {
            "weights": {name: value.clone() for name, value in slab.items()},
            "belief": {name: torch.zeros_like(slab[name]) for name in self.gating.gate_shapes},
        }

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        return {"belief": server["belief"]}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """θ = (Σ_s z_s + a/2) / (S + a), for cohorts of S clients and a undecided votes."""
        some = next(iter(assignments.gates.values()))
        voters = some.shape[0] if weight is None else (weight > 0).sum().double()
        share = voters / (voters + self.pseudo_votes)
        share = share.to(some.dtype) if isinstance(share, Tensor) else share
        belief = {layer: share * (2 * mean(z, weight) - 1) for layer, z in assignments.gates.items()}
        return {**server, "belief": belief}

    additive = True

    def evidence(self, assignment: Assignment, server: Tree) -> Tree:
        return {"votes": assignment.gates}

    def conclude(self, evidence: Tree, server: Tree, clients: int) -> Tree:
        share = clients / (clients + self.pseudo_votes)
        return {**server, "belief": {layer: share * (2 * votes - 1) for layer, votes in evidence["votes"].items()}}

    def predict(self, server: Tree) -> Params:
        theta = self.gates(server)
        if self.model == "mode":
            theta = {layer: (value > 0.5).to(value.dtype) for layer, value in theta.items()}
        return {name: value.unsqueeze(0) for name, value in self._masked(theta).items()}

    def _masked(self, gates: Gates) -> Params:
        """w̄ ⊙ z."""
        return self.gating.apply(self.slab.on(next(iter(gates.values()))), gates)

    # ------------------------------------------------------------------ the client
    def receive(self, packet: Tree) -> Tree:
        return {**packet, "weights": self._masked(self.gates(packet))}

    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        return {"scores": self.gating.part(self._logits(packet))}

    def expect(self, local: Tree, packet: Tree) -> Assignment:
        return Assignment({}, {layer: scores.sigmoid() for layer, scores in local["scores"].items()})

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        """w̄ ⊙ z for a draw z, whose gradient is passed straight to its probability."""
        drawn = self._draw(expected.gates, key)
        return self._masked({layer: drawn[layer] + pi - pi.detach() for layer, pi in expected.gates.items()})

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        return {"gates": self._draw(self.expect(local, packet).gates, key)}

    def _draw(self, gates: Gates, key: Tensor) -> Gates:
        pi = self.gating.join(gates).detach()
        return self.gating.part((joint_draws(self.gating, key, pi.dtype) < pi).to(pi.dtype))

    def realise(self, upload: Tree, reference: Tree) -> Params:
        return self._masked(upload["gates"])

    # ------------------------------------------------------------------ the wire
    def downlink(self, server: Tree) -> Layout:
        dtype = next(iter(server["belief"].values())).dtype
        return Layout({"belief": Section(dict(self.gating.gate_shapes))}, dtype=dtype)

    def uplink(self, state: Tree) -> Layout:
        """A mask, in less than one bit a weight where votes are not even."""
        dtype = next(iter(state["belief"].values())).dtype
        return Layout({}, self.gating.gate_shapes, dtype, masked=True)

    # ------------------------------------------------------------------ what the records say
    def gates(self, state: Tree) -> Gates:
        return {layer: (1 + value) / 2 for layer, value in state["belief"].items()}

    def effective_parameters(self, server: Tree) -> int:
        """How many weights a drawn network has on average; of the mode, how many it has."""
        theta = self.gating.join(self.gates(server))
        kept = (theta > 0.5).sum() if self.model == "mode" else theta.double().sum()
        return round(float(kept)) + self.gating.parameters - theta.numel()


EDGE = 1e-3
"""θ closer to 0 or 1 than this is taken for this: a client can still change its mind within a round."""
