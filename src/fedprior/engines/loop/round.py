"""One federated round, from top to bottom. It knows no algorithm by name: the prior decides what each line does.

This is the protocol in a loop, with clients in turn and messages as bytes. `stacked/together.py` maps the same
functions by `vmap`, for a GPU; tests check that the two agree.
"""

import math
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedprior import wire
from fedprior.core import trees
from fedprior.core.errors import DivergedError
from fedprior.core.federated import FederatedData
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Measures, disagreement, sums
from fedprior.core.network import Network
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.settings import Settings
from fedprior.core.trees import Tree
from fedprior.core.weighting import Share, share
from fedprior.core.workers import Workers
from fedprior.em import Algorithm, Batches, EStep, protocol
from fedprior.engines import ranks
from fedprior.engines.arithmetic import using
from fedprior.engines.attack import Attack, Poisoned
from fedprior.engines.batches import ClientBatches, Workload
from fedprior.engines.privacy import Accountant
from fedprior.engines.server_state import Record, client_diverged, clip_of, evaluate, floored, left_out, update
from fedprior.engines.unseen import Roll, judge_unseen, tested_by


@dataclass
class Simulation:
    """Everything that persists from round to round. Build it with `engines.build.build`."""

    algorithm: Algorithm
    network: Network
    data: FederatedData
    settings: Settings
    root: Tensor
    """The key of the run, from its seed."""
    workers: Workers
    """The threads for clients in turn and for evaluations."""
    encode: bool
    """Whether messages really become bytes and back. If not, their lengths are still counted exactly."""
    streamed: bool
    """Whether examples stay on the host and are copied to the device for each cohort."""
    attack: Attack | None
    poisoned: bool
    """Whether hostile clients train on poisoned examples."""
    hostile: Tensor
    """Which clients attack."""
    server: Tree
    optimiser: TreeOptimiser | None
    measures: Measures
    roll: Roll
    """Which clients take part."""
    scores: dict[str, Tensor]
    """For each measure, every client's mean on its test set with the model it last sent; nan before its first turn."""
    accountant: Accountant | None = None
    """What a private run has spent."""
    memory: dict[int, Tree] = field(default_factory=dict)
    """What each client remembers after its first turn: for the correction, and its own statistics."""
    clients: dict[str, Tensor] = field(default_factory=dict)
    """What the last evaluation found of every client, by column."""
    round: int = 0
    seconds: float = field(default=0.0)

    @property
    def workload(self) -> Workload:
        """How long a client trains."""
        return Workload.of(self.settings)

    def step(self, evaluate: bool) -> Record:
        """One round of hard EM."""
        start, number = time.perf_counter(), self.round + 1
        algorithm, turn, rate = self.algorithm, Turn(self.root, number), self.settings.rates.at(number)
        clients = self.roll.cohort(turn, self.settings.clients_per_round, private=self.settings.private)

        server = algorithm.prior.prune(self.server)
        if not clients:
            return self._with_nobody(server, turn, rate.server, evaluate)
        said, packets, down, kept = self._speak(server, turn.of(torch.tensor(clients)))
        step, scores = self._take_turns(clients, packets, turn, rate.local)
        fine = _check_clients(clients, step, number, algorithm.bound > 0)
        kept |= floored(server) | floored(step.upload)
        uploads, up = self._hear(step, algorithm.uplink(server), said, fine.tolist())
        uploads, guarded = protocol.protect(algorithm, server, uploads, turn.key(Purpose.NOISE))
        share = self.share(clients)
        found = update(algorithm, guarded, uploads, self.optimiser, share, number, rate.server, fine)
        self.server, faults = found.server, left_out(clients, found.apart.tolist(), algorithm.bound)

        used = found.kept.nonzero().flatten().tolist()
        self.memory |= {clients[i]: trees.row(step.memory, i) for i in used}
        self.measure([clients[i] for i in used], scores[found.kept])
        self.round = number
        counted = found.kept if used else fine
        record = self.record(up, down, float(step.loss[counted].mean()), kept, evaluate, faults) | clip_of(server)
        if evaluate:
            gates = step.gates, torch.func.vmap(algorithm.prior.gates)(packets)
            record |= disagreement(*trees.tree_map(lambda leaf: leaf[counted], gates))
        self.seconds += time.perf_counter() - start
        return record

    def _with_nobody(self, server: Tree, turn: Turn, rate: float | Tensor, evaluate: bool) -> Record:
        """A private round for which nobody was drawn: the server learns from noise alone, and nobody can tell."""
        uploads, guarded = protocol.protect_nobody(self.algorithm, server, turn, turn.key(Purpose.NOISE))
        number = self.round + 1
        self.server = update(self.algorithm, guarded, uploads, self.optimiser, self.share([]), number, rate).server
        self.round = number
        return self.record(0, 0, math.nan, floored(server), evaluate) | clip_of(server)

    def _speak(self, server: Tree, turn: Turn) -> tuple[list[Tree], Tree, int, set[str]]:
        """Return what was said to each client, if uploads refer to it; the packets as clients hear them, stacked; their
        bytes; and the layers where the floor acted."""
        algorithm, layout, count = self.algorithm, self.algorithm.downlink(server), len(turn.key(Purpose.BATCHES))
        said, packets, total, kept = [], [], 0, set()
        for key in protocol.broadcast_keys(algorithm.prior, turn):
            spoken = protocol.speak(algorithm, server, key, layout)
            coded, size = self._carry(spoken.coded, layout)
            said.append(spoken.said if algorithm.differences else {})
            packets.append(protocol.hear(coded, layout))
            total += size
            kept |= floored(spoken.said)
        if algorithm.prior.per_client:
            return said, trees.stack(packets), total, kept
        # All clients share the memory of one packet.
        same = trees.tree_map(lambda leaf: leaf.expand(count, *leaf.shape), packets[0])
        return said * count, same, total * count, kept

    def _take_turns(self, clients: list[int], packets: Tree, turn: Turn, rate: float | Tensor) -> tuple[EStep, Tensor]:
        """Train clients one after another on each worker; with several ranks, only this rank's share.

        On a CPU this is faster than vectorised, because grouped convolutions are slow there. Return the E-steps'
        results, stacked by client, and the measures of each hard assignment, added up over its test examples.
        """
        data, memory, places = self.data, trees.stack(self.recall(clients)), ranks.share(len(clients))
        stacked = trees.Stack(len(places))

        def take_turn(place: int) -> None:
            client = clients[places[place]]
            packet, remembered = trees.row((packets, memory), places[place])
            own = turn.of(client)
            batches: Batches = ClientBatches(data, client, self.workload, own.key(Purpose.BATCHES))
            batches = Poisoned(batches, self.hostile[client]) if self.poisoned else batches
            tamper = partial(self.attack, self.hostile[client]) if self.attack else None
            with self.workers.lend() as network:
                step, model = protocol.take_turn(
                    self.algorithm, network, packet, batches, own, remembered, rate=rate, tamper=tamper
                )
                rows, device = data.test[client], turn.root.device
                scores = sums(network, self.measures, model, data.test_x[rows].to(device), data.test_y[rows].to(device))
                stacked.put(place, (step, scores))

        with self.workers.side_by_side() as each:
            list(each(take_turn, range(len(places))))
        gathered: tuple[EStep, Tensor] = ranks.gather(stacked.rows, len(clients))
        return gathered

    def _hear(self, step: EStep, layout: wire.Layout, said: list[Tree], fine: list[bool]) -> tuple[Tree, int]:
        """Replace the uploads by what the server hears, in place; return them and their bytes.

        A client whose numbers are not finite, if the run goes on without it, sends nothing.
        """
        total = 0
        for i, reference in ((i, reference) for i, reference in enumerate(said) if fine[i]):
            sent = trees.row(step.sent, i)
            coded, size = self._carry(sent, layout)
            message = protocol.hear(coded, layout, reference)
            total += size
            if message is not sent:
                # Overwrite what was sent: a second copy of a cohort's messages would double the memory of a round.
                own = {section: step.upload[section] for section in message}
                trees.tree_map(lambda rows, leaf, i=i: rows[i].copy_(leaf), own, message)
        return {section: step.upload[section] for section in message}, total

    def _carry(self, message: Tree, layout: wire.Layout) -> tuple[Tree, int]:
        """The message that arrives at the other end, and its bytes."""
        if not self.encode:
            return message, wire.message_bytes(message, layout)
        data = wire.encode(message, layout, self.round + 1)
        return wire.decode(data, layout, self.round + 1, self.root.device), len(data)

    def recall(self, clients: list[int]) -> list[Tree]:
        """What these clients remember; new clients start from the initial memory."""
        blank = self.algorithm.remember(self.network.params(), self.network.statistics())
        return [self.memory.get(client, blank) for client in clients]

    def share(self, clients: list[int]) -> Share:
        """How much these clients count in the M-step."""
        sizes = [self.data.train.size(client) for client in clients]
        weighting = "equal" if self.settings.private else self.settings.weighting
        return share(weighting, sizes, self.roll.sizes(self.data), self.root.device)

    @property
    def accuracy(self) -> Tensor:
        """Each client's test accuracy with the model it last sent; nan before its first turn or without an accuracy."""
        return self.scores.get("accuracy", torch.full((self.data.clients,), torch.nan, dtype=torch.float64))

    def measure(self, clients: list[int], scores: Tensor) -> None:
        """Store these clients' scores [clients, measures] on their own test examples, with the models they sent."""
        if not clients:
            return
        sizes = torch.tensor([self.data.test.size(client) for client in clients])
        for name, column in zip(self.measures.names, scores.cpu().unbind(1), strict=True):
            self.scores[name][clients] = column / sizes

    def record(
        self, up: int, down: int, loss: float, kept: set[str], evaluate: bool, faults: list[Record] | None = None
    ) -> Record:
        """The record of the round that has just ended."""
        record: Record = {"round": self.round, "bytes_up": up, "bytes_down": down, "train_loss": loss}
        if kept:
            record["floored"] = sorted(kept)
        if faults:
            record["faults"] = faults
        if self.accountant:
            record["epsilon"] = self.accountant.total(self.round)
        return record | self.evaluate() if evaluate else record

    def evaluate(self) -> Record:
        """Scores and size of the current server."""
        held_out = self.roll.unseen
        data = tested_by(self.data, self.roll.seen) if held_out else self.data
        also = judge_unseen(self) if held_out else None
        record, self.clients = evaluate(
            self.algorithm, self.server, self.measures, self.scores, self.workers, data, also
        )
        return record


class InTurn:
    """Drives one simulation, with clients in turn."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def step(self, evaluate: bool) -> list[Record | DivergedError]:
        """Run one plain round."""
        with using(self.simulation.settings.arithmetic, self.simulation.root.device):
            try:
                return [self.simulation.step(evaluate)]
            except DivergedError as error:
                return [error]

    def sync(self) -> None:
        """Nothing to do: the simulation holds its own state."""


def _check_clients(clients: list[int], step: EStep, number: int, goes_on: bool) -> Tensor:
    """Which clients' numbers are finite. If the run cannot go on without the others, raise an error that names one.

    The server has not changed yet.
    """
    finite = protocol.finite(step.upload, 1) & step.loss.isfinite()
    if not bool(finite.any() if goes_on else finite.all()):
        raise client_diverged(clients[int((~finite).nonzero()[0])], number)
    return finite
