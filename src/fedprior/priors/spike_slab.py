"""The spike-and-slab prior: FedSparse.

    z_g ~ Bern(θ_g),   φ | z = 1 ~ N(w, 1/λ),   φ | z = 0 ~ N(0, 1/λ₂),   λ₀ = ½ log(λ₂/λ)
    θ_g = σ((‖w_g‖ − τ_g) / T),   τ_g = softplus(v_g)

The server owns w and v. A client optimises its own w_s and v_s, starting at the server's, on

    loss(w_s ⊙ z) + λ/2 Σ_j π_j (w_sj − w_j)² + λ₀ Σ_j π_j − κ Σ_g (π_g log θ_g + (1 − π_g) log(1 − θ_g))

with z from the hard-concrete relaxation of Bern(π). The norms in θ and π are detached: thresholds decide, weights do
not shrink to close a gate. j runs over parameters and g over gates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior import kernels
from fedprior.errors import SettingError
from fedprior.kernels import concrete
from fedprior.priors.base import Explain, Term
from fedprior.priors.gated import LocalGates, gated_layout, gated_mean, joint_draws
from fedprior.priors.gaussian import squared_distance
from fedprior.priors.thresholds import (
    CLOSED,
    NO_THRESHOLD,
    SMALLEST,
    STRETCH,
    hard_concrete,
    inverse_softplus,
    logits_and_gates,
    thresholds_for,
    without_threshold,
)
from fedprior.trees import Gates, Params, Tree
from fedprior.units import Gating
from fedprior.weighting import mean
from fedprior.wire import Layout, Section

THRESHOLDS = ("stay", "follow")

NEAR = 0.2
"""How near the watershed, as a share of it, is worth a warning."""


@dataclass(frozen=True)
class SpikeSlab(LocalGates):
    """Spike and slab with magnitude thresholds, unit by unit or weight by weight as `gating` says."""

    gating: Gating
    lambda0: float = 5e-6
    """λ₀: what one active parameter costs."""
    precision: float = 0.0
    """λ: the pull of an active weight towards the server's."""
    cross_entropy: float = 1e-4
    """κ: how much a client's gates heed the server's; the paper scales this term down."""
    temperature: float = 1e-3
    """T: how soft the threshold is, in units of a group's norm."""
    theta_start: float = 0.99
    """θ at the start: dense."""
    prune_below: float = 0.1
    """ε: gates with θ ≤ ε are not part of the server's network."""
    dense_rounds: int = 0
    """Rounds before there are any thresholds: all gates are open, and norms come to mean something."""
    prune_server: bool = True
    """Drop those gates from the server's state every round, so that they are not sent."""
    thresholds: str = "stay"
    """What τ does when the server's optimiser moves ‖w_g‖: `stay`, as Algorithm 1 reads, or `follow`, so that θ
    changes by the clients' votes alone."""
    scalars = ("lambda0", "precision", "cross_entropy", "temperature")

    def __post_init__(self) -> None:
        for name in ("lambda0", "precision", "cross_entropy"):
            if not getattr(self, name) >= 0:
                raise SettingError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise SettingError(f"temperature must be above 0, got {self.temperature}")
        if self.dense_rounds < 0:
            raise SettingError(f"dense_rounds must be at least 0, got {self.dense_rounds}")
        if self.thresholds not in THRESHOLDS:
            raise SettingError(f"thresholds must be {' or '.join(THRESHOLDS)}, got {self.thresholds!r}")
        for name in ("theta_start", "prune_below"):
            if not 0 < getattr(self, name) < 1:
                raise SettingError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")

    # ------------------------------------------------------------------ the density
    def terms(self) -> Mapping[str, Term]:
        return {"drift": self.drift, "l0": self.l0, "gates": self.agreement}

    def drift(self, assignment: Tree, server: Tree) -> Tensor:
        """−½ Σ_j z_j (w_sj − w_j)², z_j the gate of the group that weight j belongs to."""
        own = self.gating.rows(assignment["gates"])
        return -0.5 * squared_distance(assignment["weights"], server["weights"], own)

    def l0(self, assignment: Tree, server: Tree) -> Tensor:
        """−Σ_j z_j over parameters: a gate pays for each parameter it switches."""
        gates = self._joint_gates(assignment)
        return -(gates * self.gating.joint_sizes(gates)).sum()

    def agreement(self, assignment: Tree, server: Tree) -> Tensor:
        """Σ_g z log θ + (1 − z) log(1 − θ), written as z ℓ − log(1 + e^ℓ) to stay finite when θ rounds to 0 or 1."""
        logits = self.joint_logits(server)
        return (self._joint_gates(assignment) * logits - F.softplus(logits)).sum()

    def _joint_gates(self, assignment: Tree) -> Tensor:
        """All gates in one vector; what a client expects has them so already."""
        return assignment["joint"]["gates"] if "joint" in assignment else self.gating.join(assignment["gates"])

    def temper(self) -> Mapping[str, float]:
        return {"drift": self.precision, "l0": self.lambda0, "gates": self.cross_entropy}

    def tempered_log_prob(self, assignment: Tree, server: Tree) -> Tensor:
        """As in the base class. Two terms are linear in π: once a packet is received, they are one price a gate."""
        if "joint" not in server or isinstance(self.precision, Tensor) or self.precision != 0:
            return super().tempered_log_prob(assignment, server)
        return (self._joint_gates(assignment) * server["joint"]["price"]).sum() - server["joint"]["constant"]

    def logits(self, state: Tree) -> Gates:
        """(‖w_g‖ − τ_g) / T of a server, packet or client state. A packet's closed gates stay closed."""
        return self.gating.part(self.joint_logits(state))

    def joint_logits(self, state: Tree, norms: Tensor | None = None) -> Tensor:
        """The same, all layers in one vector; the norms may be known already."""
        if "joint" in state:  # a packet, once received
            return state["joint"]["logits"]
        return self._logits(state, self.gating.join(state["gates"]) > 0 if "gates" in state else None, norms)[0]

    def _logits(self, state: Tree, is_open: Tensor | None, norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and probabilities of all gates."""
        norms = self.norms(state["weights"], state) if norms is None else norms
        v = self.gating.join(state["thresholds"])
        return logits_and_gates(norms, v, is_open, self.temperature, dense=self.dense_rounds > 0)

    def norms(self, weights: Params, state: Tree) -> Tensor:
        """‖w_g‖ of all groups. Columns that read a pruned unit are gone, but their share of the norm, which nothing can
        change any more, is not: the `silent` section of a server's state or packet is the norm of what went."""
        norms = self.gating.magnitudes(weights)
        return norms if "silent" not in state else torch.hypot(norms, self._silent(state))

    def _silent(self, state: Tree) -> Tensor:
        """All layers in one vector; nothing ever goes from those that read no gated unit."""
        if "joint" in state:  # a packet, once received
            return state["joint"]["silent"]
        found, like = state["silent"], next(iter(state["weights"].values()))
        shapes = self.gating.gate_shapes.items()
        return self.gating.join({layer: found.get(layer, like.new_zeros(shape)) for layer, shape in shapes})

    def _thresholds(self, norms: Tensor, logits: Tensor | float) -> Tensor:
        """v such that the gates have these logits."""
        return thresholds_for(norms, logits, self.temperature)

    # ------------------------------------------------------------------ the server
    @property
    def _start(self) -> float:
        """The logit of θ at the start."""
        return math.log(self.theta_start / (1 - self.theta_start))

    @property
    def _edge(self) -> float:
        """The logit of ε."""
        return math.log(self.prune_below / (1 - self.prune_below))

    def init(self, params: Params) -> Tree:
        norms = self.gating.magnitudes(params)
        if self.dense_rounds == 0:
            return {"weights": params, "thresholds": self.gating.part(self._thresholds(norms, self._start))}
        none = self.gating.part(torch.full_like(norms, NO_THRESHOLD))
        return {"weights": params, "thresholds": none, "age": {"rounds": norms.new_zeros(())}}

    def _come_of_age(self, server: Tree) -> Tree:
        """Count rounds; after the dense ones, set the thresholds so that θ starts where it would have at the start."""
        if "age" not in server:
            return server
        age = server["age"]["rounds"] + 1
        start = self._thresholds(self.norms(server["weights"], server), self._start)
        v = torch.where(age == self.dense_rounds + 1, start, self.gating.join(server["thresholds"]))
        return {**server, "thresholds": self.gating.part(v), "age": {"rounds": age}}

    def open_gates(self, server: Tree) -> tuple[Gates, Gates]:
        """The gates of the server's network (θ > ε, and the floor), and the layers where the floor acted."""
        norms = self.norms(server["weights"], server)
        return self._open(self.joint_logits(server, norms), norms)

    def _open(self, logits: Tensor, norms: Tensor) -> tuple[Gates, Gates]:
        likely = (logits > self._edge).to(logits.dtype)
        # The floor must not choose a group that was pruned before: there is nothing left of it to keep.
        scores = torch.where(norms > 0, logits, CLOSED)
        return self.gating.floor(self.gating.part(likely), self.gating.part(scores))

    def prune(self, server: Tree) -> Tree:
        """w ← I[θ > ε] w, and with a unit the weights that read it, which have no effect any more.

        What the groups that lose columns lose of their norm is kept as one number each (see `norms`). A gate that only
        the floor keeps is opened again as at the start: kept but closed it would be dead weight.
        """
        server = self._come_of_age(server)
        if not self.prune_server:
            return {**server, "floored": self.open_gates(server)[1]}
        if "open" in server:  # an optimiser's momentum moves what was pruned; it is not part of any norm
            server = {**server, "weights": self.gating.prune(server["weights"], server["open"])}
        norms = self.norms(server["weights"], server)
        logits = self.joint_logits(server, norms)
        gates, floored = self._open(logits, norms)
        kept, v = self.gating.join(gates) > 0, self.gating.join(server["thresholds"])
        v = torch.where(kept & (logits <= self._edge), self._thresholds(norms, self._start), v)
        pruned = {**server, "thresholds": self.gating.part(v), "floored": floored, "open": gates}
        return {**pruned, **self._without(server, gates, kept)}

    def _without(self, server: Tree, gates: Gates, kept: Tensor) -> Tree:
        """The weights that these gates leave, and the norms of what groups that are kept have lost so far."""
        weights = self.gating.prune(server["weights"], gates)
        if not self.gating.narrowed:
            return {"weights": weights}
        gone = self.gating.magnitudes({name: value - weights[name] for name, value in server["weights"].items()})
        silent = torch.hypot(gone, self._silent(server)) if "silent" in server else gone
        return {"weights": weights, "silent": self.gating.part(torch.where(kept, silent, 0.0))}

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        if self.prune_server:
            gates = server["open"] if "open" in server else self.open_gates(server)[0]
        else:
            gates = self.gating.all_open(server["weights"])
        packet = {"weights": server["weights"], "thresholds": server["thresholds"], "gates": gates}
        return (
            {**packet, "silent": {layer: server["silent"][layer] for layer in self._narrow}}
            if self._lasting
            else packet
        )

    def solve(self, assignments: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """w = Σ z w_s / Σ z, and θ = mean of z, held away from 0 and 1 because v must stay finite."""
        weights = gated_mean(torch.func.vmap(self.gating.rows)(assignments["gates"]), assignments, server, weight)
        edge = min(self.theta_start, 1 - self.theta_start)
        means = {layer: mean(gate, weight) for layer, gate in assignments["gates"].items()}
        theta = self.gating.join(means).clamp(edge, 1 - edge)
        v = self._thresholds(self.norms(weights, server), (theta / (1 - theta)).log())
        if "age" in server:
            v = torch.where(server["age"]["rounds"] <= self.dense_rounds, self.gating.join(server["thresholds"]), v)
        return {**server, "weights": weights, "thresholds": self.gating.part(v)}

    known_slope = True

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """∇w = z (w − φ_s) and ∇v = (z − θ) σ(v) / T on average: the paper's algorithm 1, downhill."""
        sent = torch.func.vmap(self.gating.rows)(uploads["gates"])
        weights = {}
        for name, values in uploads["weights"].items():
            w = server["weights"][name]
            # Difference first: a mean of equal numbers need not equal them, and Adam makes much of the last bit.
            weights[name] = mean((w * sent[name] if name in sent else w) - values, weight)
        v = self.gating.join(server["thresholds"])
        z, theta = torch.func.vmap(self.gating.join)(uploads["gates"]), self._logits(server, None)[1]
        thresholds = mean(z - theta, weight) * v.sigmoid() / self.temperature
        if self.dense_rounds > 0:
            thresholds = torch.where(without_threshold(v), 0.0, thresholds)
        return {"weights": weights, "thresholds": self.gating.part(thresholds)}

    def adjust(self, before: Tree, after: Tree) -> Tree:
        """τ ← τ + ‖w_new‖ − ‖w_old‖ beside the step that the votes made, for the groups that are still there."""
        if self.thresholds == "stay":
            return after
        old, new = self.gating.join(before["thresholds"]), self.gating.join(after["thresholds"])
        weights, moves = after["weights"], ~without_threshold(old)
        if "open" in before:  # momentum moves what was pruned as well
            weights = self.gating.prune(weights, before["open"])
            moves = moves & (self.gating.join(before["open"]) > 0)
        further = self.norms(weights, before) - self.norms(before["weights"], before)
        followed = inverse_softplus((F.softplus(old) + further).clamp(min=SMALLEST)) + (new - old)
        return {**after, "thresholds": self.gating.part(torch.where(moves, followed, new))}

    def predict(self, server: Tree) -> Params:
        weights = self.gating.prune(server["weights"], self.open_gates(server)[0])
        return {name: value.unsqueeze(0) for name, value in weights.items()}

    # ------------------------------------------------------------------ the client
    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        return {"weights": packet["weights"], "thresholds": packet["thresholds"]}

    def receive(self, packet: Tree) -> Tree:
        logits = self.joint_logits(packet)
        price = self.cross_entropy * logits - self.lambda0 * self.gating.joint_sizes(logits)
        constant = self.cross_entropy * F.softplus(logits).sum()
        is_open = self.gating.join(packet["gates"]) > 0
        joint = {"logits": logits, "open": is_open, "price": price, "constant": constant}
        return {**packet, "joint": joint | ({"silent": self._silent(packet)} if "silent" in packet else {})}

    def expect(self, local: Tree, packet: Tree) -> Tree:
        is_open = packet["joint"]["open"] if "joint" in packet else self.gating.join(packet["gates"]) > 0
        logits, gates = self._logits(local, is_open, self.norms(local["weights"], packet))
        joint = {"logits": logits, "gates": gates}
        return {"weights": local["weights"], "gates": self.gating.part(gates), "joint": joint}

    def relax(self, expected: Tree, packet: Tree, key: Tensor) -> Params:
        """w_s ⊙ z with z hard concrete, its location set so that P(z > 0) = π."""
        logits = expected["joint"]["logits"]
        if kernels.usable(logits):
            gates = concrete.hard_concrete(logits, key, STRETCH)
        else:
            gates = hard_concrete(logits, joint_draws(self.gating, key, logits.dtype))
        return self.gating.scale(expected["weights"], gates)

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        """z ~ Bern(π), exactly; what z leaves of w_s."""
        expected = self.expect(local, packet)["joint"]
        draws = joint_draws(self.gating, key, expected["gates"].dtype)
        drawn = (draws < expected["gates"]).to(draws.dtype)
        gates, floored = self.gating.floor(self.gating.part(drawn), self.gating.part(expected["logits"]))
        return {"weights": self.leave(local["weights"], gates, packet), "gates": gates, "floored": floored}

    # ------------------------------------------------------------------ the wire
    def downlink(self, server: Tree) -> Layout:
        # A logit is (‖w‖ − τ) / T with T = 1e-3: whole numbers are too coarse. One a unit costs next to nothing in
        # full; one a weight is as many as the weights, and near enough in float16, because τ is then small.
        few = any(size > 1 for size in self.gating.sizes().values())
        precision, shapes = "float32" if few else "float16", self.gating.gate_shapes
        sections = {"thresholds": Section(shapes, dict, precision=precision)}
        if self._lasting:
            sections["silent"] = Section({layer: shapes[layer] for layer in self._narrow}, dict, precision=precision)
        return gated_layout(self.gating, server, self.support, sections)

    @property
    def _lasting(self) -> bool:
        """Whether messages say how much of a group's norm is of columns that are gone."""
        return self.prune_server and bool(self._narrow)

    @property
    def _narrow(self) -> list[str]:
        """The layers whose groups can lose columns."""
        return [layer for layer in self.gating.gate_shapes if self.gating.can_narrow(layer)]

    def follow(self, packet: Tree, weights: Params) -> Tree:
        """Rounding moves the norms, by more than T; v moves along and every θ stays what it was, as in `prune`."""
        v = self.gating.join(packet["thresholds"])
        moved = self._thresholds(self.norms(weights, packet), self.joint_logits(packet))
        moves = (self.gating.join(packet["gates"]) > 0) & ~without_threshold(v)
        return {"thresholds": self.gating.part(torch.where(moves, moved, v))}

    # ------------------------------------------------------------------ what a user is told
    def cautions(self, rounds: int) -> list[str]:
        """Whether a group stands at the watershed, where chance decides.

        A gate is pushed shut while n_g λ₀ > κ logit θ_g. θ starts alike everywhere, so groups with a little more
        than that run away, and those with a little less stay open.
        """
        edge, sizes = self.cross_entropy * self._start, self.gating.sizes()
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

    # ------------------------------------------------------------------ what the records say
    def gates(self, state: Tree) -> Gates:
        return self.gating.part(self.joint_logits(state).sigmoid())

    def closures(self, before: Tree, after: Tree, solved: bool) -> Tree:
        """Count the gates that this round closed: by votes, or by the server's step on the weights.

        T logit = ‖w‖ − τ fell because τ rose, which clients' gates decide, or because ‖w‖ fell, which nobody voted for:
        whichever was more. Where τ goes along with ‖w‖ only votes are left.
        """
        was = before["open"] if "open" in before else self.open_gates(before)[0]
        # An optimiser's momentum moves what was pruned; it is not part of any norm.
        weights = self.gating.prune(after["weights"], was) if "open" in before else after["weights"]
        later = {**after, "weights": weights}
        closed = (self.gating.join(was) > 0) & (self.gating.join(self.open_gates(later)[0]) == 0)
        raised = F.softplus(self.gating.join(after["thresholds"])) - F.softplus(self.gating.join(before["thresholds"]))
        fallen = self.temperature * (self.joint_logits(before) - self.joint_logits(later))
        only = solved or self.thresholds == "follow"
        voted = torch.ones_like(closed) if only else raised >= fallen - raised
        for cause, found in (("closed_by_votes", closed & voted), ("closed_by_step", closed & ~voted)):
            counts = {layer: gate.sum() for layer, gate in self.gating.part(found.to(raised.dtype)).items()}
            known = before.get(cause, {})
            after = {**after, cause: {layer: known.get(layer, 0.0) + count for layer, count in counts.items()}}
        return after

    def tally(self, server: Tree) -> dict[str, int]:
        gates = server["open"] if "open" in server else self.open_gates(server)[0]
        found = {f"units/{layer}": int((gate > 0).sum()) for layer, gate in gates.items()}
        for cause in ("closed_by_votes", "closed_by_step"):
            found |= {f"{cause}/{layer}": int(count) for layer, count in server.get(cause, {}).items()}
        return found

    def effective_parameters(self, server: Tree) -> int:
        return int(self.gating.effective_parameters(self.open_gates(server)[0]))
