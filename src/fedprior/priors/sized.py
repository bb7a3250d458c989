"""Spike and slab bound by a size that the user chooses: FedSparse asked for a size.

    z_g ~ Bern(θ_g),   φ | z = 1 ~ N(w, 1/λ),   φ | z = 0 ~ δ(0),   size(θ > 0) ≤ goal(round)

Clients are FedSparse's: gates of their own with magnitude thresholds, relaxed to hard concrete while they train, and
one draw z_s as their vote. The server's side differs. θ_g is 0 or `theta_start`, and it maximises the votes under the
size. With m_g the running mean of the votes, and v_g = m_g / Σ_layer m_g a unit's share of its layer's votes,

    θ_g > 0  ⟺  v_g² > μ · n_g,    n_g the parameters that go with the unit now

as for FedNarrow, whose shares are of strengths (`narrow.py`). Every round the server moves the dual variable μ to
where the size meets the schedule, which falls from the dense network to the asked size within the first `closing` of
the rounds. So there is no λ₀, and neither the scale of the weights nor that of the votes matters. Once the size is met,
nobody votes: what is left is certain, θ_g = 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.core.weighting import averaging
from fedprior.priors.base import Assignment, Explain, Term
from fedprior.priors.narrow import Narrow, shares_of
from fedprior.priors.spike_slab import SpikeSlab
from fedprior.priors.thresholds import NO_THRESHOLD
from fedprior.wire import Layout, Section

PASSES = 4
"""How often a round assigns: units that go together share weights, so one pass closes too few."""


@dataclass(frozen=True)
class Sized(Narrow):
    """Gates that the clients vote on and the server assigns such that the asked share of parameters is gone."""

    closing: float = 0.1
    """The share of rounds in which gates close."""
    recall: float = 0.8
    """How much the mean of earlier votes counts; a round's own have the rest."""
    cross_entropy: float = 1e-4
    """κ: how strongly the server's gates pull a client's."""
    temperature: float = 1e-3
    """T: how soft the thresholds are."""
    theta_start: float = 0.99
    """θ of the gates that are not closed."""
    rounds: int = 100
    """The length of the run."""
    scalars = ("sparsity", "precision", "conv_rate", "linear_rate", "cross_entropy")

    def exposes(self) -> str:
        return "clients choose gates, and which they choose depends on their data; fednarrow's are the server's"

    def check(self) -> None:
        if not 0 < self.closing <= 1:
            raise SettingError(f"closing must be above 0 and at most 1, got {self.closing}")
        if not 0 <= self.recall < 1:
            raise SettingError(f"recall must be at least 0 and below 1, got {self.recall}")
        self._clients.check()
        super().check()

    @cached_property
    def _clients(self) -> SpikeSlab:
        """The clients' side. Nothing is priced there: votes are for what training does to a unit."""
        return SpikeSlab(
            self.gating,
            self.temperature,
            self.theta_start,
            dense_rounds=1,  # gates may be certain
            lambda0=0.0,
            precision=self.precision,
            cross_entropy=self.cross_entropy,
        )

    # ------------------------------------------------------------------ the schedule
    def fit(self, rounds: int) -> "Sized":
        return replace(self, rounds=rounds)

    def cautions(self, rounds: int) -> list[str]:
        return []

    @property
    def closing_rounds(self) -> int:
        """The rounds after the first, which is dense, until the size is met."""
        return max(1, round(self.closing * self.rounds))

    @property
    def stride(self) -> int:  # type: ignore[override]
        """Its schedule in two dozen steps."""
        return max(1, self.closing_rounds // 24)

    def settled(self, round_number: int) -> bool:
        return round_number > self.closing_rounds

    def _goal(self, age: Tensor) -> Tensor:
        """Fast at first and slow in the end (Zhu and Gupta 2018), when every unit that goes is missed more."""
        left = (1 - (age - 1) / self.closing_rounds).clamp(0, 1)
        return (1 - self.sparsity * (1 - left**3)) * self.gating.parameters

    # ------------------------------------------------------------------ the server
    def init(self, params: Params) -> Tree:
        gates = self.gating.all_open(params)
        age = next(iter(gates.values())).new_zeros(())
        votes = {layer: gate.clone() for layer, gate in gates.items()}
        return {"weights": params, "open": gates, "votes": votes, "age": {"rounds": age}}

    def reassign(self, weights: Params, server: Tree, goal: Tensor) -> tuple[Gates, Gates]:
        gates, floored = server["open"], dict[str, Tensor]()
        for _ in range(PASSES):
            shares = shares_of({layer: votes * gates[layer] for layer, votes in server["votes"].items()})
            gates, acted = self.fitted(shares, gates, goal)
            floored = {layer: torch.maximum(flag, floored.get(layer, flag)) for layer, flag in acted.items()}
        return gates, floored

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """w = Σ z w_s / Σ z, and the running mean of the votes."""
        solved = super().solve(assignments, server, weight)
        return {**solved, "votes": self._recalled(self._cast(assignments.gates, weight), server["votes"])}

    def _recalled(self, cast: Gates, known: Gates) -> Gates:
        return {layer: torch.lerp(cast[layer], known[layer], self.recall) for layer in known}

    known_slope, additive = True, True

    def evidence(self, assignment: Assignment, server: Tree) -> Tree:
        return {**super().evidence(assignment, server), "votes": assignment.gates}

    def conclude(self, evidence: Tree, server: Tree, clients: int) -> Tree:
        cast = {layer: mean / (1 - self.rate(layer)) for layer, mean in evidence["votes"].items()}
        return {**super().conclude(evidence, server, clients), "votes": self._recalled(cast, server["votes"])}

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """∇w = z (w − φ_s) on average, and ∇m = m − z, of which a step of length 1 − recall is the running mean."""
        sent = torch.func.vmap(self.gating.mask)(uploads["gates"])
        known, cast, mean_of = server["weights"], self._cast(uploads["gates"], weight), averaging(weight)
        return {
            "weights": {
                name: mean_of((known[name] * sent[name] if name in sent else known[name]) - values)
                for name, values in uploads["weights"].items()
            },
            "votes": {layer: votes - cast[layer] for layer, votes in server["votes"].items()},
        }

    def _cast(self, gates: Gates, weight: Tensor | None) -> Gates:
        """The votes of a cohort. A client that did not receive a unit has not voted against it."""
        mean_of = averaging(weight)
        return {layer: mean_of(gate) / (1 - self.rate(layer)) for layer, gate in gates.items()}

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        asked = (server["age"]["rounds"] <= self.closing_rounds).to(server["age"]["rounds"].dtype)
        return {**super().broadcast(server, key), "votes": {"asked": asked}}

    def downlink(self, server: Tree) -> Layout:
        layout = super().downlink(server)
        asked = Section({"asked": ()}, precision="float32")
        return replace(layout, sections={**layout.sections, "votes": asked})

    # ------------------------------------------------------------------ the client, which is FedSparse's
    def terms(self) -> Mapping[str, Term]:
        return {"drift": self._clients.drift, "gates": self._clients.agreement}

    def temper(self) -> Mapping[str, float]:
        return {"drift": self.precision, "gates": self.cross_entropy}

    def tempered_log_prob(self, assignment: Assignment, server: Tree) -> Tensor:
        return self._clients.tempered_log_prob(assignment, server)

    def _with_thresholds(self, packet: Tree) -> Tree:
        """The packet with the thresholds at which its open gates have θ; they need not travel."""
        v = self._clients.starting_thresholds(packet)
        v = torch.where(packet["votes"]["asked"] > 0, v, NO_THRESHOLD)
        return {**packet, "thresholds": self.gating.part(v)}

    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        return self._clients.adopt(self._with_thresholds(packet), key, explain)

    def receive(self, packet: Tree) -> Tree:
        return self._clients.receive(self._with_thresholds(packet))

    def expect(self, local: Tree, packet: Tree) -> Assignment:
        return self._clients.expect(local, packet)

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        return self._clients.relax(expected, packet, key)

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        """Draw z ~ Bern(π), and send the network that it leaves."""
        drawn = self._clients.commit(local, packet, key)
        return {**drawn, "weights": self.gating.prune(local["weights"], drawn["gates"])}

    # ------------------------------------------------------------------ what the records say
    def gates(self, state: Tree) -> Gates:
        if "gates" in state:
            return {layer: self.theta_start * gate for layer, gate in state["gates"].items()}
        return super().gates(state)
