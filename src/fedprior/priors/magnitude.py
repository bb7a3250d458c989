"""Gates by magnitude: the further a group's norm is above a threshold, the likelier its gate is open.

    θ_g = σ((‖w_g‖ − τ_g) / T),   τ_g = softplus(v_g)

This defines what a server with such gates keeps, prunes and says. The prior defines what clients do with them.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.priors.gated import LocalGates, gated_layout
from fedprior.priors.received import Received
from fedprior.priors.thresholds import (
    CLOSED,
    NO_THRESHOLD,
    SMALLEST,
    inverse_softplus,
    logits_and_gates,
    thresholds_for,
    without_threshold,
)
from fedprior.units import Gating
from fedprior.wire import Layout, Section

THRESHOLDS = ("stay", "follow")


@dataclass(frozen=True)
class MagnitudeGates(LocalGates):
    """The base class of priors with thresholds on norms as gates, per unit or per weight, as `gating` says."""

    gating: Gating
    temperature: float = 1e-3
    """T: how soft the threshold is, in units of a group's norm."""
    theta_start: float = 0.99
    """θ at the start, when the network is dense."""
    prune_below: float = 0.1
    """ε: gates with θ ≤ ε are not part of the server's network."""
    dense_rounds: int = 0
    """Rounds without thresholds at the start: all gates are open while norms become meaningful."""
    prune_server: bool = True
    """Whether to drop those gates from the server's state every round, so that they are not sent."""
    thresholds: str = "stay"
    """What τ does when the server's optimiser moves ‖w_g‖: `stay`, as in Algorithm 1, or `follow`, so that only the
    clients' votes change θ."""

    def check(self) -> None:
        if not self.temperature > 0:
            raise SettingError(f"temperature must be above 0, got {self.temperature}")
        if self.dense_rounds < 0:
            raise SettingError(f"dense_rounds must be at least 0, got {self.dense_rounds}")
        if self.thresholds not in THRESHOLDS:
            raise SettingError(f"thresholds must be {' or '.join(THRESHOLDS)}, got {self.thresholds!r}")
        for name in ("theta_start", "prune_below"):
            if not 0 < getattr(self, name) < 1:
                raise SettingError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        super().check()

    def logits(self, state: Tree) -> Gates:
        """(‖w_g‖ − τ_g) / T for a server, packet or client state. A packet's closed gates stay closed."""
        return self.gating.part(self.joint_logits(state))

    def joint_logits(self, state: Tree, norms: Tensor | None = None) -> Tensor:
        """The same, with all layers in one vector; the norms may be known already."""
        if isinstance(state, Received):
            return state.known.logits
        return self._logits(state, self.gating.join(state["gates"]) > 0 if "gates" in state else None, norms)[0]

    def _logits(self, state: Tree, is_open: Tensor | None, norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and probabilities of all gates."""
        norms = self.norms(state["weights"], state) if norms is None else norms
        v = self.gating.join(state["thresholds"])
        return logits_and_gates(norms, v, is_open, self.temperature, dense=self.dense_rounds > 0)

    def norms(self, weights: Params, state: Tree) -> Tensor:
        """‖w_g‖ of all groups. Columns that read a pruned unit are gone, but their share of the norm, now constant,
        still counts: the `silent` section of a server's state or packet holds the norm of the lost columns."""
        norms = self.gating.magnitudes(weights)
        return norms if "silent" not in state else torch.hypot(norms, self._silent(state))

    def _silent(self, state: Tree) -> Tensor:
        """The silent norms of all layers in one vector; layers that read no gated unit never lose anything."""
        if isinstance(state, Received):
            return state.known.silent[0]
        found, shapes = state["silent"], self.gating.gate_shapes
        like = next(iter(state["weights"].values()))
        nothing = {layer: like.new_zeros(shape) for layer, shape in shapes.items() if layer not in found}
        return self.gating.join({**found, **nothing})

    def _thresholds(self, norms: Tensor, logits: Tensor | float) -> Tensor:
        """v such that the gates have these logits."""
        return thresholds_for(norms, logits, self.temperature)

    def starting_thresholds(self, state: Tree) -> Tensor:
        """v such that every gate of a server or packet has its initial θ."""
        return self._thresholds(self.norms(state["weights"], state), self._start)

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
        """Count rounds; after the dense ones, set the thresholds such that θ has its initial value."""
        if "age" not in server:
            return server
        age = server["age"]["rounds"] + 1
        start = self.starting_thresholds(server)
        v = torch.where(age == self.dense_rounds + 1, start, self.gating.join(server["thresholds"]))
        return {**server, "thresholds": self.gating.part(v), "age": {"rounds": age}}

    def open_gates(self, server: Tree) -> tuple[Gates, Gates]:
        """The gates of the server's network (θ > ε, and the floor), and the layers where the floor acted."""
        norms = self.norms(server["weights"], server)
        gates, floored = self._open(self.joint_logits(server, norms), norms)
        return self.gating.part(gates), floored

    def _open(self, logits: Tensor, norms: Tensor) -> tuple[Tensor, Gates]:
        """The same from the logits and norms, with all gates in one vector."""
        likely = (logits > self._edge).to(logits.dtype)
        # The floor must not choose a group that was pruned before: nothing of it is left to keep.
        scores = torch.where(norms > 0, logits, CLOSED)
        return self.gating.joint_floor(likely, scores)

    def prune(self, server: Tree) -> Tree:
        """w ← I[θ > ε] w. The weights that read a closed unit go with it, because they no longer have an effect.

        For each group that loses columns, the lost part of its norm is kept as one number (see `norms`). A gate that
        only the floor keeps is reopened as at the start: if it stayed closed, it would be dead weight.
        """
        server = self._come_of_age(server)
        if not self.prune_server:
            return {**server, "floored": self.open_gates(server)[1]}
        if "open" in server:  # an optimiser's momentum moves pruned weights, which are not part of any norm
            server = {**server, "weights": self.gating.prune(server["weights"], server["open"])}
        norms = self.norms(server["weights"], server)
        logits = self.joint_logits(server, norms)
        joint, floored = self._open(logits, norms)
        gates, kept, v = self.gating.part(joint), joint > 0, self.gating.join(server["thresholds"])
        v = torch.where(kept & (logits <= self._edge), self._thresholds(norms, self._start), v)
        pruned = {**server, "thresholds": self.gating.part(v), "floored": floored, "open": gates}
        return {**pruned, **self._without(server, gates, kept)}

    def _without(self, server: Tree, gates: Gates, kept: Tensor) -> Tree:
        """The weights that these gates leave, and the norms of what the kept groups have lost so far."""
        weights = self.gating.prune(server["weights"], gates)
        if not self.gating.narrowed:
            return {"weights": weights}
        # Biases and norms are no part of a magnitude.
        before = server["weights"].items()
        gone = self.gating.magnitudes({k: value - weights[k] if value.dim() > 1 else value for k, value in before})
        silent = torch.hypot(gone, self._silent(server)) if "silent" in server else gone
        return {"weights": weights, "silent": self.gating.part(torch.where(kept, silent, 0.0))}

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        if self.prune_server:
            gates = server["open"] if "open" in server else self.open_gates(server)[0]
        else:
            gates = self.gating.all_open(server["weights"])
        packet = {"weights": server["weights"], "thresholds": server["thresholds"], "gates": gates}
        if not self._lasting:
            return packet
        return {**packet, "silent": {layer: server["silent"][layer] for layer in self._narrow}}

    def adjust(self, before: Tree, after: Tree) -> Tree:
        """τ ← τ + ‖w_new‖ − ‖w_old‖, in addition to the step from the votes, for the groups that are still there."""
        if self.thresholds == "stay":
            return after
        old, new = self.gating.join(before["thresholds"]), self.gating.join(after["thresholds"])
        weights, moves = after["weights"], ~without_threshold(old)
        if "open" in before:  # momentum moves pruned weights as well
            weights = self.gating.prune(weights, before["open"])
            moves = moves & (self.gating.join(before["open"]) > 0)
        further = self.norms(weights, before) - self.norms(before["weights"], before)
        followed = inverse_softplus((F.softplus(old) + further).clamp(min=SMALLEST)) + (new - old)
        return {**after, "thresholds": self.gating.part(torch.where(moves, followed, new))}

    def predict(self, server: Tree) -> Params:
        weights = self.gating.prune(server["weights"], self.open_gates(server)[0])
        return {name: value.unsqueeze(0) for name, value in weights.items()}

    # ------------------------------------------------------------------ the wire
    def downlink(self, server: Tree) -> Layout:
        # A logit is (‖w‖ − τ) / T with T = 1e-3, so whole numbers are too coarse. One per unit costs almost nothing in
        # full precision. One per weight doubles the message, but float16 is enough, because τ is then small.
        few = any(size > 1 for size in self.gating.sizes().values())
        precision, shapes = "float32" if few else "float16", self.gating.gate_shapes
        sections = {"thresholds": Section(shapes, dict, precision=precision)}
        if self._lasting:
            sections["silent"] = Section({layer: shapes[layer] for layer in self._narrow}, dict, precision=precision)
        return gated_layout(self.gating, server, self.support, sections)

    @property
    def _lasting(self) -> bool:
        """Whether messages say how much of a group's norm comes from columns that are gone."""
        return self.prune_server and bool(self._narrow)

    @property
    def _narrow(self) -> list[str]:
        """The layers whose groups can lose columns."""
        return [layer for layer in self.gating.gate_shapes if self.gating.can_narrow(layer)]

    def follow(self, packet: Tree, weights: Params) -> Tree:
        """Rounding moves the norms by more than T. Move v along, so that no θ changes, as in `prune`."""
        v = self.gating.join(packet["thresholds"])
        moved = self._thresholds(self.norms(weights, packet), self.joint_logits(packet))
        moves = (self.gating.join(packet["gates"]) > 0) & ~without_threshold(v)
        return {"thresholds": self.gating.part(torch.where(moves, moved, v))}

    # ------------------------------------------------------------------ what the records say
    def gates(self, state: Tree) -> Gates:
        return self.gating.part(self.joint_logits(state).sigmoid())

    def closures(self, before: Tree, after: Tree, solved: bool) -> Tree:
        """Count the gates that this round closed: by votes, or by the server's step on the weights.

        T logit = ‖w‖ − τ fell because τ rose, which clients' gates decide, or because ‖w‖ fell, for which no client
        voted. The larger change counts. If τ follows ‖w‖, only votes can close a gate.
        """
        was = before["open"] if "open" in before else self.open_gates(before)[0]
        # An optimiser's momentum moves pruned weights, which are not part of any norm.
        weights = self.gating.prune(after["weights"], was) if "open" in before else after["weights"]
        norms = self.norms(weights, after)
        logits = self.joint_logits(after, norms)
        closed = (self.gating.join(was) > 0) & (self._open(logits, norms)[0] == 0)
        raised = F.softplus(self.gating.join(after["thresholds"])) - F.softplus(self.gating.join(before["thresholds"]))
        fallen = self.temperature * (self.joint_logits(before) - logits)
        only = solved or self.thresholds == "follow"
        voted = torch.ones_like(closed) if only else raised >= fallen - raised
        for cause, found in (("closed_by_votes", closed & voted), ("closed_by_step", closed & ~voted)):
            counts = self.gating.totals(found.to(raised.dtype))
            if cause in before:
                counts = counts + torch.stack([before[cause][layer] for layer in self.gating.gate_shapes])
            after = {**after, cause: dict(zip(self.gating.gate_shapes, counts.unbind(), strict=True))}
        return after

    def tally(self, server: Tree) -> dict[str, int]:
        gates = server["open"] if "open" in server else self.open_gates(server)[0]
        found = {f"units/{layer}": int((gate > 0).sum()) for layer, gate in gates.items()}
        for cause in ("closed_by_votes", "closed_by_step"):
            found |= {f"{cause}/{layer}": int(count) for layer, count in server.get(cause, {}).items()}
        return found

    def effective_parameters(self, server: Tree) -> int:
        return int(self.gating.effective_parameters(self.open_gates(server)[0]))
