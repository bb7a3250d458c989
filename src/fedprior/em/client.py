"""Hard EM: the E-step at a client, the M-step at the server.

Neither knows which algorithm it runs. The E-step works on one client, or vectorised on a cohort whose every argument
has a leading client dimension; both draw the same random numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedprior import keys, wire
from fedprior.corrections import Correction
from fedprior.keys import Purpose
from fedprior.network import Network
from fedprior.optimisers import NOT_ELEMENTWISE, Optimiser, TreeOptimiser
from fedprior.priors import Prior
from fedprior.trees import Gates, Params, Tree, clone, leaves, tree_map
from fedprior.wire import Layout, Wire

Tamper = Callable[[Tree, Tree], Tree]
"""A hostile client's change to its variables before it commits, given them and its packet."""


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


class Batch(NamedTuple):
    """One step's examples. Weights are 1, or 0 for padding; none at all means no padding."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    active: Tensor | None
    """Whether the client still trains; None: it does."""


class Batches(Protocol):
    """A sequence of batches, which may be made as they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, step: int, /) -> Batch: ...


class EStep(NamedTuple):
    """What one client's E-step leaves behind."""

    upload: Tree
    gates: Gates
    """π, where there are gates."""
    loss: Tensor
    """Mean training loss over the steps taken."""
    memory: Tree
    """What the correction keeps for the client's next turn."""
    coded: Tree
    """The upload as it travels, where it is rounded; `upload` is then what the client knows it has said."""


def local_objective(algorithm: Algorithm, network: Network) -> Callable[..., tuple[Tensor, Tensor]]:
    """The client's objective: loss(relax(q)) − Σ temper · log p(expect(q) | packet), and the loss alone."""
    prior = algorithm.prior

    def objective(local: Tree, packet: Tree, batch: Params, draws: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        expected = prior.expect(local, packet)
        params = prior.relax(expected, packet, draws[0])
        loss = network.training_loss(params, batch["x"], batch["y"], batch.get("weight"), draws[1])
        return loss - prior.tempered_log_prob(expected, packet), loss

    return objective


def e_step(
    algorithm: Algorithm,
    network: Network,
    packet: Tree,
    batches: Batches,
    key: Tensor,
    memory: Tree,
    *,
    vectorised: bool = False,
    tamper: Tamper | None = None,
    uplink: Layout | None = None,
) -> EStep:
    """Start q at the prior, descend the local objective, commit to a hard assignment, round it as `uplink` says."""
    prior, correction = algorithm.prior, algorithm.correction
    lift = torch.func.vmap if vectorised else _as_is
    gradient = _gradient(lift(local_objective(algorithm, network)))
    start = lift(_adopter(prior, network))(packet, keys.fold(key, Purpose.ADOPT), _all(prior, batches))
    packet = lift(prior.receive)(packet)
    direction: Params = {}
    if memory:
        support = lift(prior.support)(packet["gates"]) if "gates" in packet else {}
        direction = correction.direction(packet, memory, support)
    optimiser = TreeOptimiser(algorithm.local, start, len(key) if vectorised else 1)
    local = optimiser.values
    lr = torch.full(key.shape, algorithm.local["weights"].lr, dtype=torch.float64, device=key.device)
    losses: list[Tensor] = []
    taken: list[Tensor] = []
    step_keys = keys.fold(keys.fold(key, Purpose.STEP).unsqueeze(-1), torch.arange(len(batches), device=key.device))
    relax_keys, dropout_keys = keys.fold(step_keys, Purpose.RELAX), keys.fold(step_keys, Purpose.DROPOUT)
    for step in range(len(batches)):
        batch = batches[step]
        before = clone(local) if batch.active is not None else local
        draws = (relax_keys[..., step], dropout_keys[..., step])
        grads, loss = gradient(local, packet, _given(batch), draws)
        for name, value in direction.items():
            grads["weights"][name] = grads["weights"][name] + value
        optimiser.step(grads)
        if not prior.smooth:
            optimiser.load(lift(prior.prox)(local, packet, lr))
        if batch.active is not None:
            optimiser.load(tree_map(partial(_where, batch.active), local, before))
            taken.append(batch.active)
        losses.append(loss.detach())
    loss, steps = _mean_loss(losses, taken, lr)
    if tamper:
        local = tamper(local, packet)
    upload = lift(prior.commit)(local, packet, keys.fold(key, Purpose.COMMIT))
    extra = lift(correction.conclude)(start["weights"], local["weights"], packet, steps * lr)
    upload = lift(algorithm.with_extra)(upload, extra)
    gates = lift(prior.expect)(local, packet)["gates"]
    coded: Tree = {}
    if uplink is not None and uplink.precision is not None:
        rounding = keys.fold(key, Purpose.ROUNDING)
        coded = lift(lambda upload, packet, key: wire.quantise(upload, uplink, packet, key))(upload, packet, rounding)
        upload = {**upload, **lift(lambda coded, packet: wire.restore(coded, uplink, packet))(coded, packet)}
    return EStep(upload, gates, loss, correction.keep(memory, upload), coded)


def m_step(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree,
    optimiser: TreeOptimiser | None,
    fraction: float = 1.0,
    *,
    vectorised: bool = False,
) -> Tree:
    """Maximise Σ_s log p(φ*_s | server) in the server's variables: in closed form, or by one optimiser step.

    `fraction` is the share of all clients that the uploads are from. Vectorised, everything has a leading dimension of
    independent runs.
    """
    prior = algorithm.prior
    lift = torch.func.vmap if vectorised else _as_is

    def realise(uploads: Tree, server: Tree) -> Tree:
        return {**uploads, "weights": torch.func.vmap(lambda upload: prior.realise(upload, server))(uploads)}

    settle = lift(algorithm.settle) if algorithm.average else _as_is
    absorbed = lift(partial(algorithm.correction.absorb, fraction=fraction))(server, uploads)
    if optimiser is None:
        solved: Tree = settle(lift(prior.solve)(lift(realise)(uploads, server), absorbed))
        return solved
    server, variables = absorbed, {section: server[section] for section in optimiser.values}

    def objective(variables: Tree, server: Tree, assignments: Tree) -> tuple[Tensor, Tensor]:
        values = torch.func.vmap(lambda a: prior.log_prob(a, {**server, **variables}))(assignments)
        return -values.mean(), values

    if prior.known_slope:
        grads = lift(prior.slope)(uploads, server)
    else:
        grads = _gradient(lift(objective))(variables, server, lift(realise)(uploads, server))[0]
    optimiser.load(variables)
    optimiser.step(grads)
    updated: Tree = settle({**server, **clone(optimiser.values)})
    return updated


def _given(batch: Batch) -> Params:
    """A batch as tensors only, which is what `vmap` takes: without padding there are no weights."""
    weight = {} if batch.weight is None else {"weight": batch.weight}
    return {"x": batch.x, "y": batch.y, **weight}


def _all(prior: Prior, batches: Batches) -> list[Params]:
    """Every example and its weight, for a prior whose clients look at their data before they start."""
    steps = [batches[step] for step in range(len(batches))] if prior.looks_at_data else []
    return [
        _given(b if b.active is None or b.weight is None else b._replace(weight=b.weight * b.active[:, None]))
        for b in steps
    ]


def _adopter(prior: Prior, network: Network) -> Callable[..., Tree]:
    """`prior.adopt` with a client's mean loss over its batches as `explain`."""

    def adopt(packet: Tree, key: Tensor, batches: list[Params]) -> Tree:
        def loss(params: Params, batch: Params) -> tuple[Tensor, Tensor]:
            x, y, weight = batch["x"], batch["y"], batch.get("weight")
            size = torch.full((), len(y), device=y.device) if weight is None else weight.sum()
            return network.evaluation_loss(params, x, y, weight) * size, size

        def explain(params: Params) -> Tensor:
            losses, sizes = zip(*(loss(params, batch) for batch in batches), strict=True)
            return torch.stack(losses).sum() / torch.stack(sizes).sum()

        return prior.adopt(packet, key, explain)

    return adopt


def _as_is(anything: Any) -> Any:
    return anything


def _gradient(objective: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tree, Tensor]]:
    """∂objective/∂(first argument) and what the objective returns beside it, by plain autograd.

    Lifted to a cohort, the objective has one value a client; no client's value depends on another's variables, so the
    gradient of their sum is each client's own. torch.func.grad would record the backward pass as well, which nobody
    has a use for.
    """

    def gradient(variables: Tree, *rest: Any) -> tuple[Tree, Tensor]:
        with torch.enable_grad():
            inputs = tree_map(lambda leaf: leaf.detach().requires_grad_(), variables)
            value, beside = objective(inputs, *rest)
            flat = [leaf for _, leaf in leaves(inputs)]
            ones = torch.ones_like(value)
            found = torch.autograd.grad(value, flat, ones, allow_unused=True, materialize_grads=True)
        grads = iter(found)
        return tree_map(lambda _: next(grads), inputs), beside.detach()

    return gradient


def _mean_loss(losses: list[Tensor], taken: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's mean loss over the steps it took, and how many those were; not told which, it took all."""
    each = torch.stack(losses).to(like.dtype)
    if not taken:
        return each.mean(0), torch.full_like(like, len(losses))
    steps = torch.stack(taken).to(like.dtype)
    # A client that has finished repeats its last step, whose loss is finite if that of the step was.
    return (each * steps).sum(0) / steps.sum(0), steps.sum(0)


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new row of every client that still trains, the old row of the others."""
    return torch.where(active.reshape(-1, *[1] * (new.dim() - 1)), new, old)
