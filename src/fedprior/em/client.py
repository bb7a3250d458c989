"""The E-step at a client, or at all clients of a cohort."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedprior import keys, wire
from fedprior.em.algorithm import Algorithm
from fedprior.em.lifting import gradient_of, lifting
from fedprior.keys import Purpose
from fedprior.network import Network
from fedprior.optimisers import TreeOptimiser
from fedprior.priors import Prior
from fedprior.trees import Gates, Params, Tree, clone, tree_map
from fedprior.wire import Layout

Tamper = Callable[[Tree, Tree], Tree]
"""A hostile client's change to its variables before it commits, given them and its packet."""


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
    prior, correction, lift = algorithm.prior, algorithm.correction, lifting(vectorised)
    start = lift(_adopter(prior, network))(packet, keys.fold(key, Purpose.ADOPT), _all(prior, batches))
    packet = lift(prior.receive)(packet)
    direction: Params = {}
    if memory:
        support = lift(prior.support)(packet["gates"]) if "gates" in packet else {}
        direction = correction.direction(packet, memory, support)
    local, loss, path = _descend(algorithm, network, start, packet, batches, key, direction, vectorised)
    if tamper:
        local = tamper(local, packet)
    upload = lift(prior.commit)(local, packet, keys.fold(key, Purpose.COMMIT))
    extra = lift(correction.conclude)(start["weights"], local["weights"], packet, path)
    upload = lift(algorithm.with_extra)(upload, extra)
    gates = lift(prior.expect)(local, packet)["gates"]
    coded: Tree = {}
    if uplink is not None and uplink.precision is not None:
        rounding = keys.fold(key, Purpose.ROUNDING)
        coded = lift(lambda upload, packet, key: wire.quantise(upload, uplink, packet, key))(upload, packet, rounding)
        upload = {**upload, **lift(lambda coded, packet: wire.restore(coded, uplink, packet))(coded, packet)}
    return EStep(upload, gates, loss, correction.keep(memory, upload), coded)


def _descend(
    algorithm: Algorithm,
    network: Network,
    start: Tree,
    packet: Tree,
    batches: Batches,
    key: Tensor,
    direction: Params,
    vectorised: bool,
) -> tuple[Tree, Tensor, Tensor]:
    """One step a batch down the local objective's gradient, plus `direction`.

    Returns the client's variables, its mean loss, and how far its steps would have gone down a slope of one.
    """
    prior, lift = algorithm.prior, lifting(vectorised)
    gradient = gradient_of(lift(local_objective(algorithm, network)))
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
    return local, loss, algorithm.local["weights"].path(steps)


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
