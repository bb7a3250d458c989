"""One federated round, top to bottom. It knows no algorithm by name: the prior decides what each line does.

This is the plain version, with clients in turn and messages as bytes. `together.py` is its fast twin for a GPU; the
tests hold the two equal.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprior import wire
from fedprior.core import keys, trees
from fedprior.core.federated import FederatedData
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Measures, disagreement
from fedprior.core.network import Network
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.settings import Settings
from fedprior.core.trees import Tree
from fedprior.core.weighting import Share, share
from fedprior.core.workers import Workers
from fedprior.em import Algorithm
from fedprior.engines.attack import Attack
from fedprior.engines.batches import Schedule
from fedprior.engines.loop.cohort import Cohort, CohortResult, in_turn
from fedprior.engines.server import Record, client_diverged, evaluate, floored, update


@dataclass
class Simulation:
    """Everything that lasts from round to round. Build it with `engines.settings.build`."""

    algorithm: Algorithm
    network: Network
    data: FederatedData
    settings: Settings
    root: Tensor
    """The key of the run, from its seed."""
    workers: Workers
    """What clients in turn, and evaluations, run on."""
    encode: bool
    """Whether messages really become bytes and back; if not, their lengths are still counted exactly."""
    streamed: bool
    """Whether examples stay on the host, and each cohort's are copied to the device."""
    attack: Attack | None
    hostile: Tensor
    """Which clients attack, if any do."""
    server: Tree
    optimiser: TreeOptimiser | None
    measures: Measures
    scores: dict[str, Tensor]
    """By measure, each client's mean on its test set with the model it last sent; nan before its first turn."""
    memory: dict[int, Tree] = field(default_factory=dict)
    """What each client that has had a turn remembers: for the correction, and of its own statistics."""
    round: int = 0
    seconds: float = field(default=0.0)

    @property
    def schedule(self) -> Schedule:
        """How long a client trains."""
        return Schedule.of(self.settings)

    def step(self, evaluate: bool) -> Record:
        """One round of hard EM."""
        start, prior, number = time.perf_counter(), self.algorithm.prior, self.round + 1
        turn = Turn(self.root, number)
        clients = keys.choose(turn.key(Purpose.COHORT), self.data.clients, self.settings.clients_per_round)

        server = prior.prune(self.server)
        uplink = self.algorithm.uplink(server)
        spoken, packets, down, kept = self._send_packets(server, clients, turn)
        hostile = self.hostile[clients] if self.attack else None
        chosen = Cohort(clients, packets, self._recall(clients), hostile, self.measures)
        rate = self.settings.rates.at(number)
        result = in_turn(self.algorithm, self.workers, self.data, chosen, self.schedule, turn, self.attack, rate.local)
        _check_clients(clients, result, number)
        kept |= floored(server) | floored(result.uploads)
        uploads, up = self._send_uploads(result, uplink, spoken)
        self.server = update(self.algorithm, server, uploads, self.optimiser, self.share(clients), number, rate.server)

        self.memory |= {client: trees.row(result.memory, i) for i, client in enumerate(clients)}
        self.measure(clients, result.scores)
        self.round = number
        record = self.record(up, down, float(result.loss.mean()), kept, evaluate)
        if evaluate:
            record |= disagreement(result.gates, torch.func.vmap(prior.gates)(packets))
        self.seconds += time.perf_counter() - start
        return record

    def share(self, clients: list[int]) -> Share:
        """What these clients count for in the M-step."""
        train = self.data.train
        return share(self.settings.weighting, [train.size(client) for client in clients], train.sizes, self.root.device)

    @property
    def accuracy(self) -> Tensor:
        """Each client's test accuracy with the model it last sent; nan before its first turn, or where none is."""
        return self.scores.get("accuracy", torch.full((self.data.clients,), torch.nan, dtype=torch.float64))

    def measure(self, clients: list[int], scores: Tensor) -> None:
        """Note how these clients do on their own test examples, [clients, measures], with the models they sent."""
        sizes = torch.tensor([self.data.test.size(client) for client in clients])
        for name, column in zip(self.measures.names, scores.cpu().unbind(1), strict=True):
            self.scores[name][clients] = column / sizes

    def record(self, up: int, down: int, loss: float, kept: set[str], evaluate: bool) -> Record:
        """What is written down of the round that has just ended."""
        record: Record = {"round": self.round, "bytes_up": up, "bytes_down": down, "train_loss": loss}
        if kept:
            record["floored"] = sorted(kept)
        return record | self.evaluate() if evaluate else record

    def evaluate(self) -> Record:
        """Scores and size of the server as it is."""
        return evaluate(self.algorithm, self.server, self.measures, self.scores, self.workers, self.data)

    def _recall(self, clients: list[int]) -> Tree:
        """The clients' memories, stacked; those of new ones are as before a first turn."""
        blank = self.algorithm.remember(self.network.params(), self.network.statistics())
        memories: Tree = trees.stack([self.memory.get(client, blank) for client in clients])
        return memories

    def _send_packets(self, server: Tree, clients: list[int], turn: Turn) -> tuple[list[Tree], Tree, int, set[str]]:
        """Broadcast, encode, decode: what was said, where it is rounded; the packets as the clients see them, stacked;
        their bytes; and floored layers."""
        prior, layout = self.algorithm.prior, self.algorithm.downlink(server)
        listeners = clients if prior.per_client else clients[:1]
        spoken, packets, total, kept = [], [], 0, set()
        for client in listeners:
            said = self.algorithm.broadcast(server, turn.of(client).key(Purpose.BROADCAST))
            coded, size = self._through_wire(self.algorithm.pack(said, layout), layout)
            spoken.append(said if self.algorithm.wire.rounds else {})
            packets.append(wire.restore(coded, layout))
            total += size
            kept |= floored(said)
        if prior.per_client:
            return spoken, trees.stack(packets), total, kept
        # One packet for all: every client sees the same memory.
        count = len(clients)
        same = trees.tree_map(lambda leaf: leaf.expand(count, *leaf.shape), packets[0])
        return spoken * count, same, total * count, kept

    def _send_uploads(self, result: CohortResult, layout: wire.Layout, spoken: list[Tree]) -> tuple[Tree, int]:
        """Encode, decode: the uploads as the server sees them, in place, and their bytes."""
        uploads, total = result.uploads, 0
        for i in range(self.settings.clients_per_round):
            coded, size = self._through_wire(trees.row(result.coded or uploads, i), layout)
            total += size
            if self.encode or result.coded:
                message = wire.restore(coded, layout, spoken[i])
                # Over what was sent: a cohort of messages beside it would double the memory of a round.
                sent = {section: uploads[section] for section in message}
                trees.tree_map(lambda rows, leaf, i=i: rows[i].copy_(leaf), sent, message)
        return uploads if not self.encode else {section: uploads[section] for section in message}, total

    def _through_wire(self, message: Tree, layout: wire.Layout) -> tuple[Tree, int]:
        if not self.encode:
            return message, wire.message_bytes(message, layout)
        data = wire.encode(message, layout, self.round + 1)
        return wire.decode(data, layout, self.round + 1, self.root.device), len(data)


def _check_clients(clients: list[int], result: CohortResult, number: int) -> None:
    """A client whose numbers overflowed is named; nothing has changed at the server yet."""
    finite = result.loss.isfinite()
    for _, leaf in trees.leaves(result.uploads):
        finite = finite & leaf.flatten(1).sum(1).isfinite() if leaf.dim() > 1 else finite & leaf.isfinite()
    if not bool(finite.all()):
        raise client_diverged(clients[int((~finite).nonzero()[0])], number)
