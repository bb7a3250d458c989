"""What the priors with gates share."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.trees import Gates, Params, Tree
from fedprior.core.weighting import scaling
from fedprior.priors.base import Assignment, Prior
from fedprior.priors.gaussian import squared_distance
from fedprior.units import Gating
from fedprior.wire import Layout, Section


def gated_mean(sent: Params, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Params:
    """w = Σ_s n_s z_s φ_s / Σ_s n_s z_s; z marks what a client sent. Weights that no client sent do not change."""
    means, scaled = {}, scaling(weight)
    for name, values in assignments.weights.items():
        if name not in sent:
            means[name] = scaled(values).mean(0)
            continue
        count = scaled(sent[name])
        total = count.sum(0)
        found = (count * values).sum(0) / torch.where(total > 0, total, 1.0)
        means[name] = torch.where(total > 0, found, server["weights"][name])
    return means


def gated_evidence(sent: Params, assignment: Assignment) -> Tree:
    """What one client says about a gated mean: z φ and z."""
    weights = {name: value * sent[name] if name in sent else value for name, value in assignment.weights.items()}
    return {"weights": weights, "sent": sent}


def mean_of_evidence(evidence: Tree, server: Tree) -> Params:
    """The gated mean: of z φ, divided by that of z."""
    means = dict(evidence["weights"])
    for name, sent in evidence["sent"].items():
        known = sent > 0
        means[name] = torch.where(known, means[name] / torch.where(known, sent, 1.0), server["weights"][name])
    return means


def gated_layout(
    gating: Gating, state: Tree, mask: Callable[[Gates], Params], extra: Mapping[str, Section] | None = None
) -> Layout:
    """A layout of gates, the weights that they leave, and other sections."""
    sections = {"weights": Section(gating.shapes, mask), **(extra or {})}
    dtype = next(iter(state["weights"].values())).dtype
    return Layout(sections, gating.gate_shapes, dtype, wiring=gating.wiring)


def joint_draws(gating: Gating, key: Tensor, dtype: torch.dtype) -> Tensor:
    """One uniform number per gate, with all layers in one vector."""
    return keys.uniform(key, (sum(torch.Size(shape).numel() for shape in gating.gate_shapes.values()),), dtype)


class Gated(Prior):
    """A prior with gates: messages hold the weights that the gates leave."""

    gating: Gating

    def support(self, gates: Gates) -> Params:
        return self.gating.mask(gates)

    def downlink(self, server: Tree) -> Layout:
        return gated_layout(self.gating, server, self.support)

    def uplink(self, state: Tree) -> Layout:
        return gated_layout(self.gating, state, partial(self.sent, state=state))


class LocalGates(Gated):
    """Gates that each client decides for itself, and the server for its own network.

    A gate that is closed in a client's draw removes only its own group. The columns that read the unit belong to other
    groups, whose gates are open, so they are sent. Columns that read a unit which the *server* has pruned have no
    effect and no gradient, so they do not travel.
    """

    def exposes(self) -> str:
        return "clients choose gates, and which they choose depends on their data; fednarrow's are the server's"

    def sent(self, gates: Gates, state: Tree) -> Params:
        known = state["gates"] if "gates" in state else state.get("open")
        if known is None:
            return self.gating.rows(gates)
        # Messages are read on the host, wherever the server's state is.
        return self.gating.mask({layer: value.to(gates[layer].device) for layer, value in known.items()}, gates)

    def leave(self, weights: Params, gates: Gates, state: Tree) -> Params:
        """The weights of an upload: those that `sent` marks, and zero elsewhere."""
        known = state["gates"] if "gates" in state else state.get("open")
        if known is None:
            return self.gating.scale(weights, self.gating.join(gates))
        return self.gating.prune(weights, known, gates)


class GlobalGates(Gated):
    """Gates that the server decides and clients accept: φ | z = 1 ~ N(w, 1/λ), φ | z = 0 = 0."""

    precision: float

    def rate(self, layer: str) -> float:
        """The probability that a unit of a layer is left out of a client's packet."""
        return 0.0

    def draw(self, gates: Gates, key: Tensor) -> tuple[Gates, Gates]:
        """Keep each gate with probability 1 − rate for a client; also return the layers where the floor acted."""
        dtype = next(iter(gates.values())).dtype
        draws = self.gating.part(joint_draws(self.gating, key, dtype))
        drawn = {layer: gate * (draws[layer] >= self.rate(layer)) for layer, gate in gates.items()}
        return self.gating.floor(drawn, {layer: torch.where(g > 0, draws[layer], -1.0) for layer, g in gates.items()})

    def sub_network(self, weights: Params, gates: Gates, key: Tensor) -> Tree:
        """The packet of one client: the part of the network that its draw leaves."""
        drawn, floored = self.draw(gates, key)
        return {"weights": self.gating.prune(weights, drawn), "gates": drawn, "floored": floored}

    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """−½ Σ_j z_j (φ_j − w_j)², over the weights that the client received."""
        mask = self.gating.mask(assignment.gates)
        return -0.5 * squared_distance(assignment.weights, server["weights"], mask)

    def temper(self) -> Mapping[str, float]:
        return {"density": self.precision}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        sent = torch.func.vmap(self.gating.mask)(assignments.gates)
        return {**server, "weights": gated_mean(sent, assignments, server, weight)}

    additive = True

    def evidence(self, assignment: Assignment, server: Tree) -> Tree:
        return gated_evidence(self.gating.mask(assignment.gates), assignment)

    def conclude(self, evidence: Tree, server: Tree, clients: int) -> Tree:
        return {**server, "weights": mean_of_evidence(evidence, server)}

    def expect(self, local: Tree, packet: Tree) -> Assignment:
        return Assignment(local["weights"], packet["gates"])

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        return self.gating.apply(expected.weights, packet["gates"])

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        return {"weights": self.gating.prune(local["weights"], packet["gates"]), "gates": packet["gates"]}
