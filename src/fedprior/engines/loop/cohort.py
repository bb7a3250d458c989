"""A cohort's E-steps in turn. On a CPU this is faster than vectorised, because grouped convolutions are slow there."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from fedprior.core import trees
from fedprior.core.federated import FederatedData
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Measures, sums
from fedprior.core.network import Network
from fedprior.core.trees import Tree
from fedprior.core.workers import Workers
from fedprior.em import Algorithm, e_step
from fedprior.engines import ranks
from fedprior.engines.attack import Attack
from fedprior.engines.batches import ClientBatches, Schedule


class CohortResult(NamedTuple):
    """A cohort's uploads and what is recorded of them, stacked by client."""

    uploads: Tree
    gates: dict[str, Tensor]
    loss: Tensor
    memory: Tree
    coded: Tree
    """The uploads as they travel, where they are rounded."""
    own: dict[str, Tensor]
    """The clients' own statistics of the models they sent."""
    scores: Tensor
    """[clients, measures]: each added up over the client's own test examples, with its hard assignment."""


class Cohort(NamedTuple):
    """The clients of one round, and what each of them starts with, stacked by client."""

    clients: list[int]
    packets: Tree
    memory: Tree
    hostile: Tensor | None
    """Which clients attack; None: there are no attacks."""
    measures: Measures


def in_turn(
    algorithm: Algorithm,
    workers: Workers,
    data: FederatedData,
    cohort: Cohort,
    schedule: Schedule,
    turn: Turn,
    attack: Attack | None = None,
    rate: float | Tensor = 1.0,
) -> CohortResult:
    """One client after another, on as many cores as there are workers; where there are several ranks, their share."""
    places = ranks.share(len(cohort.clients))
    stacked = trees.Stack(len(places))

    def train(network: Network, place: int) -> None:
        position = places[place]
        client = cohort.clients[position]
        own = turn.of(client)
        batches = ClientBatches(data, client, schedule, own.key(Purpose.BATCHES))
        packet, memory = trees.tree_map(trees.channels_last, trees.row((cohort.packets, cohort.memory), position))
        tamper = partial(attack, cohort.hostile[position]) if attack and cohort.hostile is not None else None
        step = e_step(algorithm, network, packet, batches, own, memory, tamper=tamper, rate=rate)
        rows = data.test[client]
        params = {**algorithm.prior.realise(step.upload, packet), **step.own}
        x, y = data.test_x[rows].to(turn.root.device), data.test_y[rows].to(turn.root.device)
        stacked.put(place, (*step, sums(network, cohort.measures, params, x, y)))

    workers.map(train, range(len(places)))
    return CohortResult(*ranks.gather(stacked.rows, len(cohort.clients)))
