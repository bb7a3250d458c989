"""Runs whose priors differ in scalar settings, stacked: the settings become a part of the server's state."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.priors.base import Explain, Prior, Term
from fedprior.wire import Layout


def tuned(priors: Sequence[Prior], like: Tensor) -> tuple[Prior, Tree]:
    """One prior for stacked runs and, where the priors differ, the section of the server's state that says how."""
    first = priors[0]
    differing = [name for name in first.scalars if len({getattr(prior, name) for prior in priors}) > 1]
    if not differing:
        return first, {}
    if len({prior.per_client for prior in priors}) > 1:
        raise SettingError("runs that send all clients one packet cannot be stacked with runs that do not")
    values = {name: like.new_tensor([getattr(prior, name) for prior in priors]) for name in differing}
    return Tuned(first), {"settings": values}


class Tuned(Prior):
    """A prior that reads some of its settings from the server's state or packet it is given.

    It does nothing of its own: every method is the prior's, with the settings of the run at hand. They are not part of
    any message, because a run alone would have them as constants.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self.per_client, self.looks_at_data, self.smooth = prior.per_client, prior.looks_at_data, prior.smooth
        self.known_slope = prior.known_slope

    def of(self, state: Tree) -> Any:
        """The prior with the settings that a state carries."""
        prior = copy.copy(self.prior)
        for name, value in state["settings"].items():
            object.__setattr__(prior, name, value)  # a frozen dataclass: its checks were made run by run
        return prior

    def terms(self) -> Mapping[str, Term]:
        def lifted(name: str) -> Term:
            return lambda assignment, server: self.of(server).terms()[name](assignment, server)

        return {name: lifted(name) for name in self.prior.terms()}

    def temper(self) -> Mapping[str, float]:
        return self.prior.temper()

    def log_prob(self, assignment: Tree, server: Tree) -> Tensor:
        result: Tensor = self.of(server).log_prob(assignment, server)
        return result

    def tempered_log_prob(self, assignment: Tree, server: Tree) -> Tensor:
        result: Tensor = self.of(server).tempered_log_prob(assignment, server)
        return result

    def init(self, params: Params) -> Tree:
        return self.prior.init(params)

    def prune(self, server: Tree) -> Tree:
        result: Tree = self.of(server).prune(server)
        return result

    def fit(self, rounds: int) -> Prior:
        return self  # each run's prior was fitted before they were stacked

    def cautions(self, rounds: int) -> list[str]:
        return self.prior.cautions(rounds)

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        return {**self.of(server).broadcast(server, key), "settings": server["settings"]}

    def solve(self, assignments: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        result: Tree = self.of(server).solve(assignments, server, weight)
        return result

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        result: Tree = self.of(server).slope(uploads, server, weight)
        return result

    def adjust(self, before: Tree, after: Tree) -> Tree:
        result: Tree = self.of(before).adjust(before, after)
        return result

    def predict(self, server: Tree) -> Params:
        result: Params = self.of(server).predict(server)
        return result

    def responsibilities(self, assignment: Tree, server: Tree) -> Tensor:
        result: Tensor = self.of(server).responsibilities(assignment, server)
        return result

    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        result: Tree = self.of(packet).adopt(packet, key, explain)
        return result

    def receive(self, packet: Tree) -> Tree:
        result: Tree = self.of(packet).receive(packet)
        return result

    def expect(self, local: Tree, packet: Tree) -> Tree:
        result: Tree = self.of(packet).expect(local, packet)
        return result

    def relax(self, expected: Tree, packet: Tree, key: Tensor) -> Params:
        result: Params = self.of(packet).relax(expected, packet, key)
        return result

    def prox(self, local: Tree, packet: Tree, lr: Tensor) -> Tree:
        result: Tree = self.of(packet).prox(local, packet, lr)
        return result

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        result: Tree = self.of(packet).commit(local, packet, key)
        return result

    def realise(self, upload: Tree, reference: Tree) -> Params:
        result: Params = self.of(reference).realise(upload, reference)
        return result

    def downlink(self, server: Tree) -> Layout:
        return self.prior.downlink(server)

    def uplink(self, state: Tree) -> Layout:
        return self.prior.uplink(state)

    def follow(self, packet: Tree, weights: Params) -> Tree:
        result: Tree = self.of(packet).follow(packet, weights)
        return result

    def support(self, gates: Gates) -> Params:
        return self.prior.support(gates)

    def sent(self, gates: Gates, state: Tree) -> Params:
        return self.prior.sent(gates, state)

    def gates(self, state: Tree) -> Gates:
        result: Gates = self.of(state).gates(state)
        return result

    def closures(self, before: Tree, after: Tree, solved: bool) -> Tree:
        result: Tree = self.of(before).closures(before, after, solved)
        return result

    def tally(self, server: Tree) -> dict[str, int]:
        result: dict[str, int] = self.of(server).tally(server)
        return result

    def effective_parameters(self, server: Tree) -> int:
        return int(self.of(server).effective_parameters(server))
