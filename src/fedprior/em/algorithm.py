"""An algorithm: a prior, and how its two steps are taken."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedprior import wire
from fedprior.corrections import Correction
from fedprior.optimisers import NOT_ELEMENTWISE, Optimiser
from fedprior.priors import Prior
from fedprior.trees import Params, Tree
from fedprior.wire import Layout, Wire


@dataclass(frozen=True)
class Algorithm:
    """A prior, how its two steps are taken, and a correction of the local gradient."""

    prior: Prior
    local: Mapping[str, Optimiser]
    """One optimiser a section of the client's variables."""
    server: Mapping[str, Optimiser] | None = None
    """One optimiser a section of the server's state; None: the closed-form M-step."""
    correction: Correction = field(default_factory=Correction)
    name: str = "own"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How a named algorithm was built, for a run's config."""
    wire: Wire = field(default_factory=Wire)
    """How precisely its messages travel."""
    average: bool = False
    """Whether the server ships the average of its rounds instead of the last one; nobody is sent it."""

    @property
    def vectorises(self) -> bool:
        """Whether a stacked cohort can share its local optimisers, and stacked runs those of their servers."""
        optimisers = [*self.local.values(), *(self.server or {}).values()]
        return not any(optimiser.name in NOT_ELEMENTWISE for optimiser in optimisers)

    def init(self, params: Params) -> Tree:
        """The server's state from a dense model."""
        server = {**self.prior.init(params), **self.correction.init(params)}
        if not self.average:
            return server
        some = next(iter(server["weights"].values()))
        return {**server, "average": dict(server["weights"]), "averaged": {"rounds": some.new_zeros(())}}

    def settle(self, server: Tree) -> Tree:
        """The state after an M-step, with its weights taken into the average: w̄ ← w̄ + (w − w̄) · 20 / (t + 19).

        Polynomial decay (Shamir and Zhang 2013): about the last twentieth of the rounds counts, however many there are.
        """
        rounds = server["averaged"]["rounds"] + 1
        share = 20 / (rounds + 19)
        average = {name: value + (server["weights"][name] - value) * share for name, value in server["average"].items()}
        return {**server, "average": average, "averaged": {"rounds": rounds}}

    def predict(self, server: Tree) -> Params:
        """The models that the server ships, stacked."""
        return self.prior.predict({**server, "weights": server["average"]} if self.average else server)

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        """The packet for a client."""
        return self.with_extra(self.prior.broadcast(server, key), self.correction.broadcast(server))

    def with_extra(self, message: Tree, extra: Tree) -> Tree:
        """A message of the prior with what the correction adds, on the weights that the message's gates leave."""
        if not extra:
            return message
        support = self.prior.support(message["gates"]) if "gates" in message else {}
        masked = {
            section: {name: value * support.get(name, 1.0) for name, value in values.items()}
            for section, values in extra.items()
        }
        return {**message, **masked}

    def downlink(self, server: Tree) -> Layout:
        """The layout of a packet."""
        layout = self.correction.extend(self.prior.downlink(server), server, self.prior.support)
        return self.wire.layout(replace(layout, direction="down"))

    def uplink(self, server: Tree) -> Layout:
        """The layout of an upload."""
        layout = self.correction.extend(self.prior.uplink(server), server, self.prior.support)
        return self.wire.layout(replace(layout, direction="up"))

    def pack(self, spoken: Tree, layout: Layout) -> Tree:
        """A packet as it travels. Rounding moves its weights; what the prior has tied to them moves along."""
        coded = wire.quantise(spoken, layout)
        if layout.precision is None:
            return coded
        moved = self.prior.follow(spoken, wire.restore(coded, layout)["weights"])
        return {**coded, **wire.quantise({**moved, "gates": spoken.get("gates", {})}, layout)}
