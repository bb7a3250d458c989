"""The spike-and-slab prior: FedSparse.

    z_g ~ Bern(θ_g),   φ | z = 1 ~ N(w, 1/λ),   φ | z = 0 ~ N(0, 1/λ₂),   λ₀ = ½ log(λ₂/λ)
    θ_g = σ((‖w_g‖ − τ_g) / T),   τ_g = softplus(v_g)

The server owns w and v. A client optimises its own w_s and v_s, starting at the server's, on

    loss(w_s ⊙ z) + λ/2 Σ_j π_j (w_sj − w_j)² + λ₀ Σ_j π_j − κ Σ_g (π_g log θ_g + (1 − π_g) log(1 − θ_g))

with z from the hard-concrete relaxation of Bern(π). The norms in θ and π are detached: thresholds decide, and weights
do not shrink to close a gate. j runs over parameters and g over gates.

The paper can be read in two ways, `relaxation`. Either P(z > 0) = π also for the relaxed gate, or (‖w‖ − τ) / T is the
location of its distribution. Then P(z > 0) is larger than π, and it is what the objective sees of both sides' gates;
what is sent, and Algorithm 1, are of the limit at temperature zero, which is Bern(π). docs/search.md compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior.core.trees import Gates, Params, Tree, map_rows
from fedprior.core.weighting import averaging
from fedprior.priors.base import Assignment, Explain, Term
from fedprior.priors.gated import gated_evidence, gated_mean, joint_draws, mean_of_evidence
from fedprior.priors.gaussian import squared_distance
from fedprior.priors.magnitude import MagnitudeGates
from fedprior.priors.received import Known, Received
from fedprior.priors.thresholds import ACTIVE, draw_gates, without_threshold

NEAR = 0.2
"""How close to the watershed, as a share of it, deserves a warning."""


@dataclass(frozen=True)
class SpikeSlab(MagnitudeGates):
    """Spike and slab with magnitude thresholds, per unit or per weight, as `gating` says."""

    lambda0: float = 5e-6
    """λ₀: what one active parameter costs."""
    precision: float = 0.0
    """λ: the pull of an active weight towards the server's."""
    cross_entropy: float = 1e-4
    """κ: how strongly the server's gates pull a client's; the paper scales this term down."""
    relaxation: str = "probability"
    """Whether (‖w‖ − τ) / T is the logit of the relaxed gate's `probability` to be above zero, or its `location`."""
    scalars = ("lambda0", "precision", "cross_entropy", "temperature")

    # ------------------------------------------------------------------ the density
    def terms(self) -> Mapping[str, Term]:
        return {"drift": self.drift, "l0": self.l0, "gates": self.agreement}

    def drift(self, assignment: Assignment, server: Tree) -> Tensor:
        """−½ Σ_j z_j (w_sj − w_j)², where z_j is the gate of weight j's group."""
        own = self.gating.rows(assignment.gates)
        return -0.5 * squared_distance(assignment.weights, server["weights"], own)

    def l0(self, assignment: Assignment, server: Tree) -> Tensor:
        """−Σ_j z_j over parameters: a gate pays for each parameter that it switches."""
        gates = self._joint_gates(assignment)
        return -(gates * self.gating.joint_sizes(gates)).sum()

    def agreement(self, assignment: Assignment, server: Tree) -> Tensor:
        """Σ_g z log θ + (1 − z) log(1 − θ), written as z ℓ − log(1 + e^ℓ) to stay finite when θ rounds to 0 or 1.

        What a client expects of relaxed gates is compared with what is to be expected of the server's, relaxed as well.
        """
        logits = self.joint_logits(server)
        logits = self._relaxed(logits) if assignment.joint else logits
        return (self._joint_gates(assignment) * logits - F.softplus(logits)).sum()

    def _joint_gates(self, assignment: Assignment) -> Tensor:
        """All gates in one vector; an expected assignment has them in that form already."""
        return assignment.joint["gates"] if assignment.joint else self.gating.join(assignment.gates)

    def temper(self) -> Mapping[str, float]:
        return {"drift": self.precision, "l0": self.lambda0, "gates": self.cross_entropy}

    def tempered_log_prob(self, assignment: Assignment, server: Tree) -> Tensor:
        """As in the base class. Two terms are linear in π: for a received packet, they are one price per gate."""
        if not isinstance(server, Received) or isinstance(self.precision, Tensor) or self.precision != 0:
            return super().tempered_log_prob(assignment, server)
        return (self._joint_gates(assignment) * server.known.price).sum() - server.known.constant

    # ------------------------------------------------------------------ the server
    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """w = Σ z w_s / Σ z, and θ = mean of z, kept away from 0 and 1 because v must stay finite."""
        weights = gated_mean(torch.func.vmap(self.gating.rows)(assignments.gates), assignments, server, weight)
        mean_of = averaging(weight)
        means = {layer: mean_of(gate) for layer, gate in assignments.gates.items()}
        return self._solved(weights, means, server)

    def _solved(self, weights: Params, means: Gates, server: Tree) -> Tree:
        edge = min(self.theta_start, 1 - self.theta_start)
        theta = self.gating.join(means).clamp(edge, 1 - edge)
        v = self._thresholds(self.norms(weights, server), (theta / (1 - theta)).log())
        if "age" in server:
            v = torch.where(server["age"]["rounds"] <= self.dense_rounds, self.gating.join(server["thresholds"]), v)
        return {**server, "weights": weights, "thresholds": self.gating.part(v)}

    known_slope, additive = True, True

    def evidence(self, assignment: Assignment, server: Tree) -> Tree:
        return {**gated_evidence(self.gating.rows(assignment.gates), assignment), "votes": assignment.gates}

    def conclude(self, evidence: Tree, server: Tree, clients: int) -> Tree:
        return self._solved(mean_of_evidence(evidence, server), evidence["votes"], server)

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """∇w = z (w − φ_s) and ∇v = (z − θ) σ(v) / T on average: the paper's Algorithm 1, as descent."""
        mean_of, z = averaging(weight), torch.func.vmap(self.gating.join)(uploads["gates"])
        known = torch.func.vmap(lambda gates: self.gating.scale(server["weights"], gates))(z)
        # Take the difference first: a mean of equal numbers may differ from them, and Adam amplifies the last bit.
        weights = map_rows(lambda w, own: mean_of(w - own), 1, known, uploads["weights"])
        v, theta = self.gating.join(server["thresholds"]), self._logits(server, None)[1]
        thresholds = mean_of(z - theta) * v.sigmoid() / self.temperature
        if self.dense_rounds > 0:
            thresholds = torch.where(without_threshold(v), 0.0, thresholds)
        return {"weights": weights, "thresholds": self.gating.part(thresholds)}

    # ------------------------------------------------------------------ the client
    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        return {"weights": packet["weights"], "thresholds": packet["thresholds"]}

    def receive(self, packet: Tree) -> Received:
        logits = self.joint_logits(packet)
        relaxed = self._relaxed(logits)
        price = self.cross_entropy * relaxed - self.lambda0 * self.gating.joint_sizes(logits)
        constant = self.cross_entropy * F.softplus(relaxed).sum()
        is_open = self.gating.join(packet["gates"]) > 0
        silent = (self._silent(packet),) if "silent" in packet else ()
        return Received(packet, Known(logits, is_open, price, constant, silent))

    def _posterior(self, local: Tree, packet: Tree) -> tuple[Tensor, Tensor]:
        """Logits and probabilities of a client's gates."""
        is_open = packet.known.is_open if isinstance(packet, Received) else self.gating.join(packet["gates"]) > 0
        return self._logits(local, is_open, self.norms(local["weights"], packet))

    def _relaxed(self, logits: Tensor) -> Tensor:
        """The logits of P(z > 0) of the relaxed gates."""
        return logits + ACTIVE if self.relaxation == "location" else logits

    def inclusion(self, local: Tree, packet: Tree) -> Gates:
        return self.gating.part(self._posterior(local, packet)[1])

    def expect(self, local: Tree, packet: Tree) -> Assignment:
        """w_s, and the probabilities P(z > 0) of the relaxed gates."""
        logits, gates = self._posterior(local, packet)
        if self.relaxation == "location":
            logits = self._relaxed(logits)
            gates = logits.sigmoid()
        return Assignment(local["weights"], self.gating.part(gates), {"logits": logits, "gates": gates})

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        """w_s ⊙ z, where z is hard concrete with P(z > 0) as expected."""
        return self.gating.scale(expected.weights, draw_gates(expected.joint["logits"], key))

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        """Draw z ~ Bern(π), the relaxation at temperature zero; keep the part of w_s that z leaves."""
        logits, inclusion = self._posterior(local, packet)
        draws = joint_draws(self.gating, key, inclusion.dtype)
        drawn = (draws < inclusion).to(draws.dtype)
        joint, floored = self.gating.joint_floor(drawn, logits)
        gates = self.gating.part(joint)
        return {"weights": self.leave(local["weights"], gates, packet), "gates": gates, "floored": floored}

    # ------------------------------------------------------------------ what a user is told
    def cautions(self, rounds: int) -> list[str]:
        """Warn about groups at the watershed, where chance decides.

        A gate is pushed shut while n_g λ₀ > κ logit θ_g, of relaxed gates. θ starts at the same value everywhere, so
        groups slightly above that run away, and those slightly below stay open.
        """
        start = self._start + (ACTIVE if self.relaxation == "location" else 0.0)
        edge, sizes = self.cross_entropy * start, self.gating.sizes()
        near = {layer: n for layer, n in sizes.items() if abs(n * self.lambda0 - edge) < NEAR * edge}
        if not near:
            return []
        low, high = (1 - NEAR) * edge / max(near.values()), (1 + NEAR) * edge / min(near.values())
        layers = ", ".join(list(near)[:4]) + (f" and {len(near) - 4} more" if len(near) > 4 else "")
        first = next(iter(near.values())) * self.lambda0
        return [
            f"λ₀ = {self.lambda0:g} is at the watershed of {layers}: n λ₀ = {first:.1e} is within 20% of κ logit θ = "
            f"{edge:.1e}, so small changes decide whether these gates close; take lambda0 below {low:.1e} or above "
            f"{high:.1e}"
        ]
