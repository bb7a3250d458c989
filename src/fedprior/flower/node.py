"""A client's half of a round, whoever carries the messages: a packet's bytes in, an upload's bytes out."""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from fedprior import wire
from fedprior.core import keys
from fedprior.core.errors import DivergedError, WireError
from fedprior.core.federated import ClientData, FederatedData
from fedprior.core.frozen import copied
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Measures, disagreement, measures, sums
from fedprior.core.network import Network
from fedprior.core.trees import Params, Tree
from fedprior.em import EStep, protocol
from fedprior.engines.batches import ClientBatches
from fedprior.engines.build import device_of
from fedprior.engines.server_state import floored
from fedprior.flower.job import Job
from fedprior.flower.memory import Memory


class Order(NamedTuple):
    """What the server asks of a client."""

    packet: bytes
    number: int
    """The round."""
    run: str
    accepted: int
    """The round in which the server last used an upload of this client; 0 means never."""


Metrics = dict[str, int | float | list[int]]


class Answer(NamedTuple):
    """What a client sends back."""

    upload: bytes
    metrics: Metrics


@dataclass
class Node:
    """One client on its own machine."""

    job: Job
    client: int
    network: Network
    data: FederatedData
    """Its own examples, as a federation of one client."""
    folder: Path
    """Where the client keeps its memory."""
    down: wire.Layout
    up: wire.Layout
    measures: Measures

    @classmethod
    def new(cls, job: Job, client: int, data: ClientData, folder: Path) -> "Node":
        """Build a client from its number and its data."""
        job.check_client(client)
        device = device_of(job.settings)
        network = replace(job.network, module=copied(job.network.module).to(device))
        own = job.examples([data], network).to(device)
        # Any server state gives the layouts: they depend only on the model and the prior.
        blank = job.algorithm.init(network.params(), network.statistics())
        layouts = job.algorithm.downlink(blank), job.algorithm.uplink(blank)
        return cls(job, client, network, own, folder, *layouts, measures(network, own, job.settings.metrics))

    def introduce(self) -> Metrics:
        """Say which client this is, with fingerprints of the messages that it reads and writes."""
        down, up = (int.from_bytes(layout.fingerprint, "big", signed=True) for layout in (self.down, self.up))
        return {"client": self.client, "examples": self.data.train.size(0), "down": down, "up": up}

    def respond(self, order: Order) -> Answer:
        """Do exactly what the simulator does for this client in this round."""
        algorithm, device = self.job.algorithm, next(self.network.module.parameters()).device
        turn = Turn(keys.key(self.job.settings.seed, device), order.number, self.client)
        packet = protocol.hear(wire.decode(order.packet, self.down, order.number, device), self.down)
        blank = algorithm.remember(self.network.params(), self.network.statistics())
        memory = Memory(self.folder, order.run, self.client, blank)
        remembered = memory.recall(order.accepted)
        batches = ClientBatches(self.data, 0, self.job.workload, turn.key(Purpose.BATCHES))
        rate = self.job.settings.rates.at(order.number).local
        step, model = protocol.take_turn(algorithm, self.network, packet, batches, turn, remembered, rate=rate)
        if not bool(step.loss.isfinite()):
            raise DivergedError(f"client {self.client} diverged in round {order.number}; lower the learning rates")
        try:
            upload = wire.encode(step.sent, algorithm.uplink(packet), order.number)
        except WireError as error:
            raise DivergedError(f"client {self.client} diverged in round {order.number}: {error}") from error
        metrics = self._metrics(order.number, step, model, packet)
        # This comes last: the client must remember exactly what it sent.
        memory.keep(order.number, step.memory)
        return Answer(upload, {**metrics, "forgot": int(memory.lost)})

    def _metrics(self, number: int, step: EStep, model: Params, packet: Tree) -> Metrics:
        """Return what the client tells the server besides the upload."""
        rows = self.data.test[0]
        found = sums(self.network, self.measures, model, self.data.test_x[rows], self.data.test_y[rows]) / len(rows)
        kept = floored(step.upload)
        return {
            "client": self.client,
            "round": number,
            "examples": self.data.train.size(0),
            "loss": float(step.loss),
            "tested": len(rows),
            # Leave out scores that are not finite: the server would refuse them.
            **{
                f"local_{name}": one
                for name, one in zip(self.measures.names, found.tolist(), strict=True)
                if isfinite(one)
            },
            "floored": [i for i, layer in enumerate(self.up.gates) if layer in kept],
            **disagreement(step.gates, self.job.algorithm.prior.gates(packet)),
        }
