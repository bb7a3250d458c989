"""Hard EM: the E-step at a client, the M-step at the server.

Neither knows which algorithm it runs. The E-step works on one client, or vectorised on a cohort whose every argument
has a leading client dimension; both draw the same random numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedprior import keys
from fedprior.keys import Purpose
from fedprior.network import Network
from fedprior.optimisers import NOT_ELEMENTWISE, Optimiser, TreeOptimiser
from fedprior.priors import Prior
from fedprior.trees import Gates, Tree, leaves, tree_map


@dataclass(frozen=True)
class Algorithm:
    """A prior and how its two steps are taken."""

    prior: Prior
    local: Mapping[str, Optimiser]
    """One optimiser a section of the client's variables."""
    server: Mapping[str, Optimiser] | None = None
    """One optimiser a section of the server's state; None: the closed-form M-step."""
    name: str = "own"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How a named algorithm was built, for a run's config."""

    @property
    def vectorises(self) -> bool:
        """Whether a stacked cohort can share its local optimisers."""
        return not any(optimiser.name in NOT_ELEMENTWISE for optimiser in self.local.values())


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


def local_objective(algorithm: Algorithm, network: Network) -> Callable[..., tuple[Tensor, Tensor]]:
    """The client's objective: loss(relax(q)) − Σ temper · log p(expect(q) | packet), and the loss alone."""
    prior = algorithm.prior

    def objective(
        local: Tree, packet: Tree, x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        params = prior.relax(local, packet, keys.fold(key, Purpose.RELAX))
        loss = network.training_loss(params, x, y, weight, keys.fold(key, Purpose.DROPOUT))
        return loss - prior.tempered_log_prob(prior.expect(local, packet), packet), loss

    return objective


def e_step(
    algorithm: Algorithm,
    network: Network,
    packet: Tree,
    batches: Batches,
    key: Tensor,
    *,
    vectorised: bool = False,
) -> EStep:
    """Start q at the prior, descend the local objective, commit to a hard assignment."""
    prior = algorithm.prior
    lift = torch.func.vmap if vectorised else _as_is
    gradient = (_cohort_gradient if vectorised else _gradient)(local_objective(algorithm, network))
    first = batches[0]

    def adopt(packet: Tree, key: Tensor, x: Tensor, y: Tensor, weight: Tensor | None) -> Tree:
        return prior.adopt(packet, key, lambda params: network.training_loss(params, x, y, weight, key))

    local = lift(adopt)(packet, keys.fold(key, Purpose.ADOPT), first.x, first.y, first.weight)
    optimiser = TreeOptimiser(algorithm.local, local)
    lr = torch.full(key.shape, algorithm.local["weights"].lr, device=key.device)
    total, steps = torch.zeros((), device=key.device), torch.zeros((), device=key.device)
    for step in range(len(batches)):
        batch = batches[step]
        local = optimiser.values
        before = tree_map(Tensor.clone, local) if batch.active is not None else local
        grads, loss = gradient(local, packet, batch.x, batch.y, batch.weight, keys.fold(key, step))
        optimiser.step(grads)
        if not prior.smooth:
            optimiser.load(lift(prior.prox)(local, packet, lr))
        if batch.active is not None:
            optimiser.load(tree_map(partial(_where, batch.active), local, before))
        taken = 1.0 if batch.active is None else batch.active.to(loss.dtype)
        total, steps = total + loss.detach() * taken, steps + taken
    local = optimiser.values
    upload = lift(prior.commit)(local, packet, keys.fold(key, Purpose.COMMIT))
    gates = lift(prior.expect)(local, packet)["gates"]
    return EStep(upload, gates, total / steps)


def m_step(algorithm: Algorithm, server: Tree, uploads: Tree, optimiser: TreeOptimiser | None) -> Tree:
    """Maximise Σ_s log p(φ*_s | server) in the server's variables: in closed form, or by one optimiser step."""
    prior = algorithm.prior
    realised = torch.func.vmap(lambda upload: prior.realise(upload, server))(uploads)
    assignments = {**uploads, "weights": realised}
    if optimiser is None:
        return prior.solve(assignments, server)
    variables = {section: server[section] for section in optimiser.values}

    def objective(variables: Tree) -> tuple[Tensor, None]:
        return -torch.func.vmap(lambda a: prior.log_prob(a, {**server, **variables}))(assignments).mean(), None

    grads = _gradient(objective)(variables)[0]
    optimiser.load(variables)
    optimiser.step(grads)
    return {**server, **tree_map(Tensor.clone, optimiser.values)}


def _as_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _gradient(objective: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tree, Any]]:
    """∂objective/∂(first argument) and what the objective returns beside it, by plain autograd.

    torch.func.grad records the backward pass as well; for one client that costs a fifth of the time.
    """

    def gradient(variables: Tree, *rest: Any) -> tuple[Tree, Any]:
        with torch.enable_grad():
            inputs = tree_map(lambda leaf: leaf.detach().requires_grad_(), variables)
            value, beside = objective(inputs, *rest)
            flat = [leaf for _, leaf in leaves(inputs)]
            grads = iter(torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True))
        return tree_map(lambda _: next(grads), inputs), None if beside is None else beside.detach()

    return gradient


def _cohort_gradient(objective: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tree, Tensor]]:
    """The same for a stacked cohort."""
    lifted = torch.func.vmap(torch.func.grad_and_value(objective, has_aux=True))

    def gradient(*arguments: Any) -> tuple[Tree, Tensor]:
        grads, (_, loss) = lifted(*arguments)
        return grads, loss

    return gradient


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new row of every client that still trains, the old row of the others."""
    return torch.where(active.reshape(-1, *[1] * (new.dim() - 1)), new, old)
