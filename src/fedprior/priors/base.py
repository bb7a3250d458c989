"""The one interface behind every algorithm: a prior p(φ | server) over client parameters.

A prior says what the server knows, what it tells a client, what the client optimises and sends back, and how the
server learns from that. It is not an optimiser, a network or a data set, and it keeps no state. Every method is a pure
function of tensors, so that the same code runs for one client, for a vectorised cohort, and on a real device.

Three views of the client's posterior q complete the density: `relax` (what the network runs with while it trains),
`expect` (what the penalty sees) and `commit` (the hard assignment, which is what is sent).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedprior.core.errors import SettingError, described
from fedprior.core.trees import Gates, Params, Tree, count
from fedprior.wire import Layout, Section

NONE: Params = {}
"""No tensors; nobody changes it."""


class Assignment(NamedTuple):
    """What a client's parameters are, or are expected to be: what a density is of. Stacked, those of many clients.

    What travels is not this but a tree of sections, which may say less: see `Prior.realise`.
    """

    weights: Params
    gates: Gates = NONE
    joint: Params = NONE
    """For a prior that has worked them out: `gates` and their `logits`, all layers in one vector."""
    precision: Params = NONE
    """How sure a client is of each weight, for a prior whose clients say so."""

    @classmethod
    def of(cls, weights: Params, upload: Tree) -> "Assignment":
        """That of an upload that stands for these weights."""
        return cls(weights, upload.get("gates", {}), precision=upload.get("precision", {}))


Term = Callable[[Assignment, Tree], Tensor]
"""One term of a log density: a function of an assignment and of what the server knows."""
Explain = Callable[[Params], Tensor]
"""A client's mean loss under given parameters; smaller explains the data better."""


class Prior:
    """The base class of all priors. The defaults suit one point in parameter space without gates, all of whose weights
    travel. A prior must define its `density` and, for an M-step in closed form, `solve`."""

    scalars: ClassVar[tuple[str, ...]] = ()
    """Non-negative settings that may be tensors, so that runs which differ in them can train together."""
    told: ClassVar[tuple[str, ...]] = ("weights",)
    """The sections of the server's state that every client is told, unless `broadcast` says something else."""

    def __init_subclass__(cls) -> None:
        """A slope belongs to the density that it was derived from, and evidence to a closed form: one who changes that
        alone inherits none."""
        super().__init_subclass__()
        if {"density", "terms", "realise"} & vars(cls).keys() and not {"slope", "known_slope"} & vars(cls).keys():
            cls.known_slope = False
        if {"solve", "realise"} & vars(cls).keys() and not {"evidence", "conclude", "additive"} & vars(cls).keys():
            cls.additive = False

    def check(self) -> None:
        """Refuse settings out of range. Call this when an algorithm is built: later, scalars may be tensors."""
        what = type(self).__name__
        if unknown := self.temper().keys() - self.terms().keys():
            raise SettingError(
                f"{what} tempers {', '.join(sorted(unknown))}, but its terms are {', '.join(self.terms())}"
            )
        for name in self.scalars:
            if not hasattr(self, name):
                raise SettingError(f"{what} names {name!r} among its scalars, but has no such field")
            if not getattr(self, name) >= 0:
                raise SettingError(f"{name} must be at least 0, got {getattr(self, name)}")

    def at(self, settings: Mapping[str, Tensor]) -> Self:
        """The prior of one of several stacked runs, with these tensors in place of its own scalars."""
        return replace(self, **settings)  # type: ignore[type-var]  # one that has scalars is a dataclass

    # ------------------------------------------------------------------ the density
    def density(self, assignment: Assignment, server: Tree) -> Tensor:
        """log p(assignment | server) at unit scale, without constants, if it is one term.

        `server` is the server's state in the M-step, and the packet that a client received in the E-step. The density
        is differentiable in both arguments.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither a density nor terms")

    def terms(self) -> Mapping[str, Term]:
        """The density as named terms, each a function of the same arguments."""
        return {"density": self.density}

    def temper(self) -> Mapping[str, float]:
        """The weight of each term in a client's objective; terms that are not named have weight zero."""
        return dict.fromkeys(self.terms(), 1.0)

    def log_prob(self, assignment: Assignment, server: Tree) -> Tensor:
        """The sum of all terms at unit scale, which the M-step maximises."""
        return torch.stack([self._value(name, assignment, server) for name in self.terms()]).sum()

    def tempered_log_prob(self, assignment: Assignment, server: Tree) -> Tensor:
        """The terms weighted by `temper`, as in a client's objective; 0 if all weights are."""
        temper = self.temper()
        weighed = [weight * self._value(name, assignment, server) for name, weight in temper.items() if _counts(weight)]
        return torch.stack(weighed).sum() if weighed else torch.zeros(())

    def _value(self, name: str, assignment: Assignment, server: Tree) -> Tensor:
        """A term, which must be one number."""
        value = self.terms()[name](assignment, server)
        if not isinstance(value, Tensor) or value.dim():
            got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else described(value)
            raise SettingError(f"the term {name!r} of {type(self).__name__} must be a tensor of one number, got {got}")
        return value

    # ------------------------------------------------------------------ the server
    def init(self, params: Params) -> Tree:
        """The server's state from a dense model."""
        return {"weights": params}

    def fit(self, rounds: int) -> "Prior":
        """The prior for a run of this many rounds, for a prior that follows a schedule."""
        return self

    def prune(self, server: Tree) -> Tree:
        """Drop what the server no longer needs from its own state before it speaks."""
        return server

    per_client: bool = False
    """Whether `broadcast` says something different to each client."""

    def broadcast(self, server: Tree, key: Tensor) -> Tree:
        """The packet that the server sends."""
        return {section: server[section] for section in self.told}

    def solve(self, assignments: Assignment, server: Tree, weight: Tensor | None = None) -> Tree:
        """The closed-form M-step, if there is one: the server that maximises Σ_s n_s log p(φ_s) over stacked
        assignments. `weight` is n_s, the examples behind each; None if all count equally. See `weighting.py`."""
        raise NotImplementedError(f"{type(self).__name__} has no M-step in closed form")

    additive: bool = False
    """Whether that M-step needs of a cohort only the mean of `evidence`. A deployed server then folds in each upload
    when it arrives, and its memory does not grow with the cohort: see `em/folding.py`."""

    def evidence(self, assignment: Assignment, server: Tree) -> Tree:
        """What one client's assignment says, to be averaged by n_s."""
        return {"weights": assignment.weights}

    def conclude(self, evidence: Tree, server: Tree, clients: int) -> Tree:
        """`solve` from the mean evidence of so many clients."""
        return {**server, "weights": evidence["weights"]}

    captured: bool = True
    """Whether a CUDA graph can hold the server's side, which must then not wait for the device."""
    known_slope: bool = False
    """Whether `slope` is known in closed form; if not, the M-step differentiates `log_prob`."""

    def slope(self, uploads: Tree, server: Tree, weight: Tensor | None = None) -> Tree:
        """The gradient of −`log_prob` in the server's variables, averaged over stacked uploads by `weight`."""
        raise NotImplementedError

    def adjust(self, before: Tree, after: Tree) -> Tree:
        """Adjust the server after an optimiser step: some values must follow the ones that moved."""
        return after

    def predict(self, server: Tree) -> Params:
        """The server's models, stacked: [K, …] with K > 1 for an ensemble."""
        return {name: value.unsqueeze(0) for name, value in server["weights"].items()}

    def inclusion(self, local: Tree, packet: Tree) -> Gates:
        """π, the probabilities of a client's own gates; empty without gates."""
        return self.expect(local, packet).gates

    def responsibilities(self, assignment: Assignment, server: Tree) -> Tensor:
        """How much each of the server's models answers for a client: one number per model, which sum to 1."""
        return torch.ones(1)

    # ------------------------------------------------------------------ the client
    looks_at_data: bool = False
    """Whether `adopt` calls `explain`. If not, it must not be called."""

    def adopt(self, packet: Tree, key: Tensor, explain: Explain) -> Tree:
        """Start q at the prior; return the client's variables."""
        return {"weights": packet["weights"]}

    def receive(self, packet: Tree) -> Tree:
        """The packet, with everything that a client computes from it once before training."""
        return packet

    def expect(self, local: Tree, packet: Tree) -> Assignment:
        """The expected assignment under q, for the penalty; `relax` receives it as well."""
        return Assignment(local["weights"])

    def relax(self, expected: Assignment, packet: Tree, key: Tensor) -> Params:
        """A differentiable draw from q, for the network to run with."""
        return expected.weights

    curved: bool = False
    """Whether `natural` turns gradients into natural ones."""

    def natural(self, grads: Tree, local: Tree, packet: Tree) -> Tree:
        """The natural gradient of the local objective, for its steps: its gradient in the metric of q."""
        return grads

    smooth: bool = True
    """False if `log_prob` has a term that is not differentiable, for which `prox` takes the step."""

    def prox(self, local: Tree, packet: Tree, lr: Tensor) -> Tree:
        """The exact proximal step for the part of the penalty that is not smooth, after each step of size `lr`."""
        return local

    def commit(self, local: Tree, packet: Tree, key: Tensor) -> Tree:
        """The hard assignment φ*: the upload."""
        return {"weights": local["weights"]}

    def realise(self, upload: Tree, reference: Tree) -> Params:
        """The parameters φ* that an upload stands for, given the packet or server state it refers to."""
        return upload["weights"]

    def sample(self, local: Tree, packet: Tree, key: Tensor) -> Params:
        """A network drawn from q, for an ensemble of them: by default what a hard assignment stands for."""
        return self.realise(self.commit(local, packet, key), packet)

    # ------------------------------------------------------------------ the wire
    def downlink(self, server: Tree) -> Layout:
        """The layout of a packet: every number that clients are told, in full precision unless it is a weight."""
        layout = dense_layout(server["weights"])
        shapes = {name: {key: tuple(x.shape) for key, x in server[name].items()} for name in self.told}
        others = {name: Section(shape, precision="float32") for name, shape in shapes.items() if name != "weights"}
        return replace(layout, sections={**layout.sections, **others})

    def uplink(self, state: Tree) -> Layout:
        """The layout of an upload. `state` is the packet that it answers, or the server's state behind that packet."""
        return dense_layout(state["weights"])

    def follow(self, packet: Tree, weights: Params) -> Tree:
        """Adjust the other sections of a packet to its rounded weights, `weights`."""
        return {}

    def support(self, gates: Gates) -> Params:
        """Which weights these gates leave in the network; weights that are not named are always part of it."""
        return {}

    def sent(self, gates: Gates, state: Tree) -> Params:
        """Which weights an upload with these gates holds; `state` as in `uplink`."""
        return self.support(gates)

    def exposes(self) -> str:
        """What the server learns from clients' data beside the mean of their weights, in words; empty if nothing.

        A private run protects that mean alone.
        """
        return f"the M-step of {type(self).__name__} is not a mean of weights"

    # ------------------------------------------------------------------ what a user is told
    def cautions(self, rounds: int) -> list[str]:
        """What a user should know about these settings before training for this many rounds, one line each."""
        return []

    # ------------------------------------------------------------------ what the records say
    def gates(self, state: Tree) -> Gates:
        """Gate probabilities of a server's state or packet; empty without gates."""
        return {}

    def closures(self, before: Tree, after: Tree, solved: bool) -> Tree:
        """The server after an M-step, `solved` in closed form or not, with the closed gates counted."""
        return after

    def tally(self, server: Tree) -> dict[str, int]:
        """How many gates of each layer are open and what closed the others, as `units/conv1`; empty without gates."""
        return {}

    def effective_parameters(self, server: Tree) -> int:
        """The size of the network that the server would ship."""
        return count(self.predict(server))


def _counts(weight: float | Tensor) -> bool:
    """Whether a term must be computed, which for a stacked weight is not known."""
    return isinstance(weight, Tensor) or weight != 0


def dense_layout(params: Params, models: int = 0) -> Layout:
    """A layout of every parameter. The `models` leading dimensions count models."""
    shapes = {name: tuple(value.shape) for name, value in params.items()}
    return Layout({"weights": Section(shapes, models=models)}, dtype=next(iter(params.values())).dtype)
