"""The E-step of one client, or of all clients in a cohort."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprior import wire
from fedprior.core import keys
from fedprior.core.keys import Purpose, Turn
from fedprior.core.network import Network
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.trees import Gates, Params, Tree, clone, leaves, tree_map
from fedprior.em import statistics
from fedprior.em.algorithm import Algorithm
from fedprior.em.batch import Batches, given
from fedprior.em.lifting import Lift, lifting
from fedprior.em.statistics import Running
from fedprior.priors import Prior

Tamper = Callable[[Tree, Tree], Tree]
"""How a hostile client changes its variables, given them and its packet, before it commits."""


class EStep(NamedTuple):
    """The result of one client's E-step."""

    upload: Tree
    gates: Gates
    """π, if there are gates."""
    loss: Tensor
    """The mean training loss over the steps taken."""
    memory: Tree
    """What the correction keeps for the client's next turn."""
    coded: Tree
    """The upload as it travels, if that differs: rounded, or only a part. `upload` is then what its receiver reads."""
    own: Params
    """The client's own statistics of the model that it sent; empty if norms use the batch's."""

    @property
    def sent(self) -> Tree:
        """The upload as it travels, rounded or not."""
        return self.coded or self.upload


def local_objective(
    prior: Prior, network: Network, *, running: bool = False
) -> Callable[..., tuple[Tensor, tuple[Tensor, Params]]]:
    """The client's objective: loss(relax(q)) − Σ temper · log p(expect(q) | packet), and the loss alone.

    If requested, it also returns the statistics of the batch.
    """

    def objective(
        local: Tree, packet: Tree, batch: dict[str, Any], draws: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Params]]:
        expected = prior.expect(local, packet)
        params = prior.relax(expected, packet, draws[0])
        examples = batch["x"], batch["y"], batch.get("weight"), draws[1]
        if running:
            loss, found = network.training_with_statistics(params, *examples)
        else:
            loss, found = network.training_loss(params, *examples), {}
        return loss - prior.tempered_log_prob(expected, packet), (loss, found)

    return objective


def gradient_of(objective: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tree, Any]]:
    """∂objective/∂(first argument), and the objective's other results, by plain autograd.

    Lifted to a cohort, the objective has one value per client. No client's value depends on another's variables, so the
    gradient of the sum is each client's own. torch.func.grad would also record the backward pass, which is not needed.
    """

    def gradient(variables: Tree, *rest: Any) -> tuple[Tree, Any]:
        with torch.enable_grad():
            inputs = tree_map(lambda leaf: leaf.detach().requires_grad_(), variables)
            value, beside = objective(inputs, *rest)
            flat = [leaf for _, leaf in leaves(inputs)]
            # Torch compares the shapes of its own ones with none; for ours it imports sympy, which takes a second.
            ones = torch.ones_like(value) if value.dim() else None
            found = torch.autograd.grad(value, flat, ones, allow_unused=True, materialize_grads=True)
        grads = iter(found)
        return tree_map(lambda _: next(grads), inputs), tree_map(Tensor.detach, beside)

    return gradient


def e_step(
    algorithm: Algorithm,
    network: Network,
    packet: Tree,
    batches: Batches,
    turn: Turn,
    memory: Tree,
    *,
    vectorised: bool = False,
    settings: Params | None = None,
    tamper: Tamper | None = None,
    rounded: bool = True,
    rate: float | Tensor = 1.0,
) -> EStep:
    """Start q at the prior, descend the local objective, commit to a hard assignment, and round it as on the wire.

    `rate` is the schedule's factor for the learning rates in this round. If vectorised, everything has a leading
    dimension of clients, including `settings`, in which the priors of their runs differ.
    """
    correction, lift = algorithm.correction, lifting(algorithm, vectorised, settings)
    examples = _all(batches) if algorithm.prior.looks_at_data else []
    start = lift(lambda own: _adopter(own.prior, network))(packet, turn.key(Purpose.ADOPT), examples)
    packet = lift(lambda own: own.prior.receive)(packet)
    direction: Params = {}
    if memory:
        support = lift(lambda own: own.prior.support)(packet["gates"]) if "gates" in packet else {}
        direction = correction.direction(packet, memory, support)
    running = _running(algorithm, network, packet, memory)
    local, loss, path = _descend(algorithm, network, start, packet, batches, turn, direction, lift, running, rate)
    if tamper:
        local = tamper(local, packet)
    upload = lift(lambda own: own.prior.commit)(local, packet, turn.key(Purpose.COMMIT))
    received = start.get("weights", packet.get("weights", {}))
    extra = lift(lambda own: own.correction.conclude)(received, local.get("weights", received), packet, path)
    upload = lift(lambda own: own.answer)(upload, extra, packet)
    gates = lift(lambda own: own.prior.inclusion)(local, packet)
    meant, coded = upload, Tree()
    if rounded and algorithm.differences:
        meant = lift(lambda own: own.prepare)(upload, packet, memory)
        coded, heard = lift(lambda own: partial(_round, own))(meant, packet, turn.key(Purpose.ROUNDING))
        upload = {**upload, **heard}
    step = EStep(upload, gates, loss, correction.keep(memory, upload, meant), coded, {})
    if not network.norms or algorithm.statistics.kind == "batch":
        return step
    return _with_statistics(algorithm, network, step, received, packet, batches, running, lift)


def _running(algorithm: Algorithm, network: Network, packet: Tree, memory: Tree) -> Running | None:
    """Running averages that start at the server's or, if clients keep their own, at the client's."""
    chosen = algorithm.statistics
    if not network.norms or chosen.kind == "batch" or chosen.report != "running":
        return None
    return Running(
        network, statistics.one_model(memory["statistics"] if chosen.kind == "local" else packet["statistics"])
    )


def _with_statistics(
    algorithm: Algorithm,
    network: Network,
    step: EStep,
    received: Params,
    packet: Tree,
    batches: Batches,
    running: Running | None,
    lift: Lift,
) -> EStep:
    """Add the client's own statistics to an E-step, to be kept or reported with the upload."""
    if running:
        own = running.statistics()
    else:
        sent = lift(lambda own: own.prior.realise)(step.upload, packet)
        own = statistics.measure(network, lift, sent, batches)
    step = step._replace(own=statistics.without_count(own))
    if algorithm.statistics.kind == "local":
        # No message check covers these, so a loss that is not finite names the client.
        finite = torch.stack([value.isfinite().all(-1) for value in step.own.values()]).all(0)
        loss = torch.where(finite, step.loss, torch.nan)
        return step._replace(memory={**step.memory, "statistics": own}, loss=loss)
    if algorithm.statistics.report == "received":
        own = statistics.measure(network, lift, received, batches)
    upload = lift(lambda own: own.report)(step.upload, own, packet)
    coded = {**step.coded, "statistics": upload["statistics"]} if step.coded else {}
    return step._replace(upload=upload, coded=coded)


def _round(algorithm: Algorithm, upload: Tree, packet: Tree, key: Tensor) -> tuple[Tree, Tree]:
    """An upload as it travels, and as its receiver reads it."""
    layout = algorithm.uplink(packet)
    # Statistics come last and are not rounded.
    layout = replace(layout, sections={name: s for name, s in layout.sections.items() if name != "statistics"})
    coded = wire.quantise(upload, layout, packet, key)
    return coded, wire.restore(coded, layout, packet)


def _descend(
    algorithm: Algorithm,
    network: Network,
    start: Tree,
    packet: Tree,
    batches: Batches,
    turn: Turn,
    direction: Params,
    lift: Lift,
    running: Running | None,
    rate: float | Tensor,
) -> tuple[Tree, Tensor, Tensor]:
    """Take one step per batch down the local objective's gradient plus `direction`.

    Return the client's variables, its mean loss, and how far its steps would have descended a slope of one.
    """
    gradient = gradient_of(lift(lambda own: local_objective(own.prior, network, running=running is not None)))
    steps = torch.arange(len(batches), device=turn.root.device)
    relax_keys, dropout_keys = (keys.fold(turn.key(p).unsqueeze(-1), steps) for p in (Purpose.RELAX, Purpose.DROPOUT))
    optimiser = TreeOptimiser(algorithm.local, start, len(relax_keys) if relax_keys.dim() > 1 else 1)
    optimiser.scale(rate)
    local = optimiser.values
    lr = torch.full(relax_keys.shape[:-1], algorithm.main.lr, dtype=torch.float64, device=steps.device) * rate
    losses: list[Tensor] = []
    taken: list[Tensor] = []
    for step in range(len(batches)):
        batch = batches[step]
        before = clone(local) if batch.active is not None else local
        draws = (relax_keys[..., step], dropout_keys[..., step])
        grads, (loss, found) = gradient(local, packet, given(batch), draws)
        for name, value in direction.items():
            grads["weights"][name] = grads["weights"][name] + value
        optimiser.step(grads)
        if not algorithm.prior.smooth:
            optimiser.load(lift(lambda own: own.prior.prox)(local, packet, lr))
        if batch.active is not None:
            optimiser.load(tree_map(partial(_where, batch.active), local, before))
            taken.append(batch.active)
        if running:
            running.add(found, batch)
        losses.append(loss.detach())
    loss, count = _mean_loss(losses, taken, lr)
    return local, loss, algorithm.main.path(count) * rate


def _all(batches: Batches) -> list[dict[str, Any]]:
    """All examples and their weights, for a prior whose clients look at their data before they start."""
    steps = [batches[step] for step in range(len(batches))]
    return [given(batch) | ({} if batch.active is None else {"active": batch.active}) for batch in steps]


def _adopter(prior: Prior, network: Network) -> Callable[..., Tree]:
    """`prior.adopt` with a client's mean loss over its batches as `explain`."""

    def adopt(packet: Tree, key: Tensor, batches: list[dict[str, Any]]) -> Tree:
        def loss(params: Params, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            x, y, weight = batch["x"], batch["y"], batch.get("weight")
            size = torch.full((), len(y), device=y.device) if weight is None else weight.sum()
            size = size * batch["active"] if "active" in batch else size
            return network.evaluation_loss(params, x, y, weight) * size, size

        def explain(params: Params) -> Tensor:
            losses, sizes = zip(*(loss(params, batch) for batch in batches), strict=True)
            return torch.stack(losses).sum() / torch.stack(sizes).sum()

        return prior.adopt(packet, key, explain)

    return adopt


def _mean_loss(losses: list[Tensor], taken: list[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's mean loss over the steps it took, and their number; without `taken`, it took all."""
    each = torch.stack(losses).to(like.dtype)
    if not taken:
        return each.mean(0), torch.full_like(like, len(losses))
    steps = torch.stack(taken).to(like.dtype)
    # A client that has finished repeats its last step, whose loss is finite if the original was.
    return (each * steps).sum(0) / steps.sum(0), steps.sum(0)


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new row for every client that still trains, the old row for the others."""
    return torch.where(active.reshape(-1, *[1] * (new.dim() - 1)), new, old)
