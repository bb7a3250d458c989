"""Clients that never took part: who they are, and what they can expect of the server's model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedprior.core import keys
from fedprior.core.federated import FederatedData, Shards
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Judged, Measures, judge, local_scores, sums
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.core.trees import Tree
from fedprior.core.workers import Workers
from fedprior.em import Algorithm, protocol
from fedprior.engines.batches import ClientBatches, Workload


class Run(Protocol):
    """What must be known of a simulation to judge newcomers."""

    algorithm: Algorithm
    network: Network
    data: FederatedData
    settings: Settings
    root: Tensor
    workers: Workers
    server: Tree
    measures: Measures
    roll: "Roll"
    round: int

    @property
    def workload(self) -> Workload: ...


@dataclass(frozen=True)
class Roll:
    """Which clients take part in a run, and which are held out."""

    seen: list[int]
    unseen: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, root: Tensor, clients: int, share: float) -> "Roll":
        """Hold out this share of the clients, drawn by the key of the run."""
        unseen = sorted(keys.choose(keys.fold(root, Purpose.UNSEEN), clients, held_out(clients, share)))
        return cls([client for client in range(clients) if client not in set(unseen)], unseen)

    def cohort(self, turn: Turn, count: int, *, private: bool = False) -> list[int]:
        """The clients of a round."""
        return [self.seen[place] for place in protocol.cohort(turn, len(self.seen), count, private=private)]

    def sizes(self, data: FederatedData) -> np.ndarray:
        """How many training examples those have that take part."""
        return data.train.sizes[self.seen] if self.unseen else data.train.sizes


def held_out(clients: int, share: float) -> int:
    """How many clients a share of them is."""
    return round(share * clients)


def tested_by(data: FederatedData, clients: Sequence[int]) -> FederatedData:
    """The same data, with the test examples of these clients only."""
    kept = set(clients)
    parts = [data.test[client] if client in kept else data.test.rows[:0] for client in range(data.clients)]
    return replace(data, test=Shards(torch.cat(parts), np.cumsum([0, *map(len, parts)])))


def judge_unseen(run: Run) -> Judged:
    """What the server's model scores on the test examples of clients that never took part, as `unseen_NAME`; and what
    it scores on each of them after the E-step that a newcomer would make, on average, as `newcomer_NAME`.

    The former also by client.
    """
    models = run.algorithm.ship(run.algorithm.prior.prune(run.server))
    found = judge(run.workers, run.measures, models, tested_by(run.data, run.roll.unseen))
    as_it_is = {
        f"unseen_{name.removeprefix('global_')}": one
        for name, one in found.scores.items()
        if name.startswith("global_")
    }
    rows = torch.stack(run.workers.map(lambda network, client: newcomer(run, network, client), run.roll.unseen))
    own = local_scores(dict(zip(run.measures.names, rows.unbind(1), strict=True)))
    after = {f"newcomer_{name.removeprefix('local_')}": one for name, one in own.items()}
    return Judged({**as_it_is, **after}, found.clients)


def newcomer(run: Run, network: Network, client: int) -> Tensor:
    """Every measure of the model that a client would commit to if its first turn were the next round's."""
    turn = Turn(run.root, run.round + 1, client)
    batches = ClientBatches(run.data, client, run.workload, turn.key(Purpose.BATCHES))
    blank = run.algorithm.remember(run.network.params(), run.network.statistics())
    rate = run.settings.rates.at(run.round + 1).local
    model = protocol.rehearse(run.algorithm, network, run.server, batches, turn, blank, rate)
    data, rows, device = run.data, run.data.test[client], run.root.device
    found = sums(network, run.measures, model, data.test_x[rows].to(device), data.test_y[rows].to(device))
    return (found / len(rows)).cpu()
