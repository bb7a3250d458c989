"""The protocol: the four moments of a round, each a pure function.

    the server speaks          `speak`      to each client or, if all hear the same, once
    a client hears             `hear`       the message after the wire; the server hears uploads by the same function
    a client takes its turn    `take_turn`  E-step and hard assignment
    the server concludes       `conclude`   M-step

An engine only decides how to map them over clients: one after another (`engines/loop`), by `vmap` over runs and clients
at once (`engines/stacked`), or over as many machines (`flower`). It also carries the messages in between.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedprior import wire
from fedprior.core import keys, trees
from fedprior.core.keys import Purpose, Turn
from fedprior.core.network import Network
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.trees import Params, Tree
from fedprior.core.weighting import Share
from fedprior.em.algorithm import Algorithm
from fedprior.em.batch import Batches
from fedprior.em.estep import EStep, Tamper, e_step
from fedprior.em.folding import Sums, m_step_folded
from fedprior.em.lifting import lifting
from fedprior.em.mstep import m_step
from fedprior.em.reception import after_all, receive
from fedprior.priors import Prior
from fedprior.wire import Layout


class Spoken(NamedTuple):
    """A packet at the server."""

    said: Tree
    """Its content, to which a rounded upload refers."""
    coded: Tree
    """The same, as it travels."""


class Conclusion(NamedTuple):
    """The server after a round, and how its uploads were received."""

    server: Tree
    sound: Tensor
    """Whether the new state is finite."""
    apart: Tensor
    """How far away each upload was, as a multiple of the usual distance; infinite if it was not finite."""
    kept: Tensor
    """Which uploads counted."""


# ---------------------------------------------------------------------- who takes part, and with which draws
def cohort(turn: Turn, population: int, count: int, attempt: int = 0, *, private: bool = False) -> list[int]:
    """The clients of a round; each further attempt to find enough gives others.

    In private, `count` is how many they are on average: each is drawn apart from all others.
    """
    key = turn.key(Purpose.COHORT)
    if private:
        return keys.each_with(key, population, count / population)
    return keys.choose(keys.fold(key, attempt) if attempt else key, population, count)


def broadcast_keys(prior: Prior, turn: Turn) -> Tensor:
    """The keys for the server's packets: one for each client of `turn` or, if all hear the same, only the first
    client's."""
    key = turn.key(Purpose.BROADCAST)
    return key if prior.per_client or not key.dim() else key[..., :1]


# ---------------------------------------------------------------------- the four moments
def speak(algorithm: Algorithm, server: Tree, key: Tensor, layout: Layout) -> Spoken:
    """The pruned server speaks."""
    said = algorithm.broadcast(server, key)
    return Spoken(said, algorithm.pack(said, layout))


def hear(coded: Tree, layout: Layout, said: Tree | None = None) -> Tree:
    """Read a message: a client's packet or, given what the server `said` to it, a client's upload."""
    return wire.restore(coded, layout, said)


def take_turn(
    algorithm: Algorithm,
    network: Network,
    packet: Tree,
    batches: Batches,
    turn: Turn,
    memory: Tree,
    *,
    rate: float | Tensor = 1.0,
    tamper: Tamper | None = None,
    rounded: bool = True,
    vectorised: bool = False,
    settings: Params | None = None,
) -> tuple[EStep, Params]:
    """A client (or, vectorised, a cohort) trains and commits. Also return the model that it commits to.

    If `rounded` is False, that is the model before the wire rounds it. If vectorised, everything has a leading
    dimension of clients, including `settings`, in which the priors of their runs differ.
    """
    if not vectorised:
        packet, memory = trees.tree_map(trees.channels_last, (packet, memory))
    how: dict[str, Any] = {"vectorised": vectorised, "settings": settings}
    step = e_step(algorithm, network, packet, batches, turn, memory, tamper=tamper, rounded=rounded, rate=rate, **how)
    realise = lifting(algorithm, **how)(lambda own: own.prior.realise)
    return step, {**realise(step.upload, packet), **step.own}


def silence(algorithm: Algorithm, server: Tree, turn: Turn) -> Tree:
    """The upload of a client that has not moved, for a round without any."""
    packet = algorithm.broadcast(server, turn.key(Purpose.BROADCAST))
    local = algorithm.prior.adopt(packet, turn.key(Purpose.ADOPT), _no_data)
    return algorithm.prior.commit(local, packet, turn.key(Purpose.COMMIT))


def imagine(algorithm: Algorithm, server: Tree, key: Tensor) -> Params:
    """A draw from the prior: the model of a client that has no data."""
    packet = algorithm.broadcast(server, keys.fold(key, Purpose.BROADCAST))
    local = algorithm.prior.adopt(packet, keys.fold(key, Purpose.ADOPT), _no_data)
    return algorithm.prior.sample(local, algorithm.prior.receive(packet), keys.fold(key, Purpose.COMMIT))


def _no_data(params: Params) -> Tensor:
    """The loss of a client that has no data."""
    return torch.zeros(())


def protect(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree,
    key: Tensor,
    *,
    vectorised: bool = False,
    settings: Params | None = None,
) -> tuple[Tree, Tree]:
    """What the server (or, vectorised, those of several runs) may learn from, and the server that does: see
    `guard.py`."""
    return lifting(algorithm, vectorised, settings)(lambda own: own.protect)(uploads, server, key)


def protect_nobody(algorithm: Algorithm, server: Tree, turn: Turn, key: Tensor) -> tuple[Tree, Tree]:
    """The same of a private round for which nobody was drawn, or to which nobody has answered."""
    uploads = trees.stack([silence(algorithm, server, turn)])
    return algorithm.protect(uploads, server, key, nobody=True)


def conclude(
    algorithm: Algorithm,
    server: Tree,
    uploads: Tree,
    optimiser: TreeOptimiser | None,
    share: Share,
    rate: float | Tensor = 1.0,
    fine: Tensor | None = None,
    *,
    vectorised: bool = False,
    settings: Params | None = None,
) -> Conclusion:
    """The server (or, vectorised, those of several runs) receives a cohort's uploads and takes its M-step.

    `fine` marks the uploads whose numbers are finite; all are, if it is not given. The optimiser has moved in any case,
    unless no upload counts and there is one run: a caller that rejects the new state must restore it.
    """
    how: dict[str, Any] = {"vectorised": vectorised, "settings": settings}
    if fine is None:
        some = next(trees.leaves(uploads))[1]
        fine = torch.ones(some.shape[: 1 + vectorised], dtype=torch.bool, device=some.device)
    if not algorithm.bound:
        updated = m_step(algorithm, server, uploads, optimiser, *share, rate=rate, **how)
        return Conclusion(updated, _sound(updated, vectorised), torch.where(fine, 0.0, torch.inf), fine)
    found = receive(algorithm, server, uploads, share, fine, **how)
    some = found.kept.any(-1)
    updated = server
    if vectorised or bool(some):
        updated = m_step(algorithm, server, found.uploads, optimiser, *found.share, rate=rate, **how)
    if vectorised:
        updated = _where(some, updated, server)
    updated = {**updated, **({"usual": found.usual} if found.usual else {})}
    return Conclusion(updated, _sound(updated, vectorised), found.apart, found.kept)


def _sound(server: Tree, vectorised: bool) -> Tensor:
    """Whether the numbers of a server, or of each of several, are finite."""
    return finite(
        {name: part for name, part in server.items() if name not in ("floored", "usual", "clip")}, int(vectorised)
    )


def _where(moved: Tensor, after: Tree, before: Tree) -> Tree:
    """The state after an M-step for the runs in which some upload counted, and the one before it for the others."""
    known = {name: {k: before[name][k] for k in part if k in before.get(name, {})} for name, part in after.items()}
    moving = {name: {k: after[name][k] for k in part} for name, part in known.items()}
    chosen = trees.map_rows(lambda new, old: torch.where(moved[:, None], new, old), 1, moving, known)
    return {name: {**part, **chosen[name]} for name, part in after.items()}


def conclude_folded(
    algorithm: Algorithm,
    server: Tree,
    sums: Sums,
    optimiser: TreeOptimiser | None,
    share: Share,
    rate: float | Tensor = 1.0,
) -> Conclusion:
    """`conclude` for uploads that were folded in one by one, as far as they were not left out."""
    updated = m_step_folded(algorithm, server, sums, optimiser, share.fraction, rate=rate) if sums.clients else server
    usual = after_all(server, sums.earlier)
    updated = {**updated, **({"usual": usual} if usual else {})}
    everyone = torch.ones(sums.clients, dtype=torch.bool)
    return Conclusion(updated, _sound(updated, False), torch.zeros(sums.clients), everyone)


def rehearse(
    algorithm: Algorithm,
    network: Network,
    server: Tree,
    batches: Batches,
    turn: Turn,
    memory: Tree,
    rate: float | Tensor = 1.0,
) -> Params:
    """The first three moments for one client: the model that it would commit to, before the wire rounds it."""
    server = algorithm.prior.prune(server)
    layout = algorithm.downlink(server)
    spoken = speak(algorithm, server, broadcast_keys(algorithm.prior, turn), layout)
    packet = hear(spoken.coded, layout)
    return take_turn(algorithm, network, packet, batches, turn, memory, rate=rate, rounded=False)[1]


# ---------------------------------------------------------------------- overflow
def finite(tree: Tree, dims: int) -> Tensor:
    """Whether all numbers are finite, for each index of the first `dims` dimensions (runs or clients)."""
    return torch.stack([rows.sum(-1) for rows in trees.few_rows(tree, dims)]).isfinite().all(0)
