"""The server's half of a round, whoever carries the messages: packets as bytes, uploads as bytes, the M-step."""

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedprior import wire
from fedprior.core import keys, trees
from fedprior.core.frozen import copied
from fedprior.core.keys import Purpose, Turn
from fedprior.core.metrics import Measures, blank_scores, measures
from fedprior.core.network import Network
from fedprior.core.optimisers import TreeOptimiser
from fedprior.core.probabilities import PROBABILITIES
from fedprior.core.trees import Tree
from fedprior.core.weighting import share
from fedprior.core.workers import Workers
from fedprior.em import protocol
from fedprior.em.folding import Sums, fold, obstacle
from fedprior.em.reception import one_apart
from fedprior.engines.build import device_of
from fedprior.engines.privacy import accountant_of, check_budget
from fedprior.engines.server_state import Record, clip_of, evaluate, final_model, floored, left_out, totals, update
from fedprior.flower.job import Job
from fedprior.version import __version__


class Upload(NamedTuple):
    """A client's answer that passed all checks."""

    message: Tree
    examples: int
    """How many examples the client says it has."""
    loss: float
    scores: Mapping[str, float]
    """By measure, the mean over the client's own test examples with its hard assignment; empty if it has none."""
    disagreement: tuple[float, float] | None = None
    """Mean and maximum of |π − θ| over gates; None if there are none."""
    floored: tuple[str, ...] = ()
    """Layers in which the floor kept one of the client's units."""
    apart: float = 0.0
    """Where uploads are folded in: how far away it was, as a multiple of the usual distance."""
    forgot: bool = False
    """Whether the client has lost its memory of earlier turns."""


@dataclass
class Round:
    """One round while it is open. The server does not change before the round is closed."""

    number: int
    draws: Turn
    server: Tree
    """The server's pruned state, from which packets are made and to which uploads refer."""
    down: wire.Layout
    up: wire.Layout
    bytes_up: int = 0
    bytes_down: int = 0
    floored: set[str] = field(default_factory=set)
    faults: list[Record] = field(default_factory=list)
    quarantined: list[Record] = field(default_factory=list)
    """The nodes that were quarantined in this round."""
    stragglers: list[int] = field(default_factory=list)
    """The clients that had not answered when there were enough replies."""
    packets: dict[int, bytes] = field(default_factory=dict)
    """Packets by client; −1 stands for the one that all clients get."""
    spoken: dict[int, protocol.Spoken] = field(default_factory=dict)
    """The same packets before they are encoded as bytes."""
    sums: Sums | None = None
    """What the uploads so far add up to, if each is folded in when it arrives."""


@dataclass
class Server:
    """Everything that the server keeps from round to round."""

    job: Job
    run: str
    """A random name under which clients keep what they remember of this run."""
    network: Network
    root: Tensor
    state: Tree
    optimiser: TreeOptimiser | None
    measures: Measures
    scores: dict[str, Tensor]
    """By measure, each client's mean on its test set with the model it last sent; nan before its first turn."""
    accepted: dict[int, int] = field(default_factory=dict)
    """For every client, the last round in which its upload was used."""
    examples: dict[int, int] = field(default_factory=dict)
    """How many examples each client has, for the clients that have said so."""
    left_out: list[Record] = field(default_factory=list)
    """Whose uploads of the last round were too far away to be used, as faults."""
    clients: dict[str, Tensor] = field(default_factory=dict)
    """What the last evaluation found of every client, by column."""
    round: int = 0
    seconds: float = 0.0
    folds: bool = False
    """Whether each upload is folded in when it arrives, instead of keeping all of a round."""
    secret: Tensor = field(default_factory=lambda: keys.key(secrets.randbits(63)))
    """The key of a private run's cohorts and noise. Devices know the seed, so neither may follow from it."""

    @classmethod
    def new(cls, job: Job, run: str) -> "Server":
        """Build a server before its first round."""
        check_budget(job.settings, job.clients)
        device = device_of(job.settings)
        network = replace(job.network, module=copied(job.network.module).to(device))
        state, server = job.algorithm.init(network.params(), network.statistics()), job.algorithm.server
        optimiser = TreeOptimiser(server, state) if server is not None else None
        what = measures(network, job.test, job.settings.metrics)
        scores = blank_scores(what, job.clients)
        return cls(job, run, network, keys.key(job.settings.seed, device), state, optimiser, what, scores)

    @property
    def accuracy(self) -> Tensor:
        """Each client's test accuracy with the model it last sent; nan before its first turn, or if there is none."""
        return self.scores.get("accuracy", torch.full((self.job.clients,), torch.nan, dtype=torch.float64))

    def begin(self) -> Round:
        """Open the next round."""
        server, algorithm = self.job.algorithm.prior.prune(self.state), self.job.algorithm
        number = self.round + 1
        down, up, sums = algorithm.downlink(server), algorithm.uplink(server), Sums() if self.folds else None
        return Round(number, Turn(self.root, number), server, down, up, sums=sums)

    def packet(self, turn: Round, client: int) -> bytes:
        """Return this round's packet for a client. If all clients get the same, there is one packet for all."""
        listener = self._listener(client)
        if listener not in turn.packets:
            turn.packets[listener] = wire.encode(self._speak(turn, client).coded, turn.down, turn.number)
            if turn.up.precision is None:  # no longer needed
                del turn.spoken[listener]
        return turn.packets[listener]

    def read(self, turn: Round, client: int, data: bytes) -> Tree:
        """Read an upload, or raise a WireError. Its length is checked before anything is allocated for it."""
        coded = wire.decode(data, turn.up, turn.number, self.root.device)
        return protocol.hear(coded, turn.up, self._speak(turn, client).said if turn.up.precision else None)

    def receive(self, turn: Round, upload: Upload) -> Upload:
        """Take an upload that has passed all checks: fold it in, if uploads are not kept until the round closes."""
        if turn.sums is None:
            return upload
        weight = upload.examples if self.job.settings.weighting == "examples" else 1
        apart = one_apart(self.job.algorithm, turn.server, upload.message, turn.sums.earlier)
        if apart <= self._most:
            fold(self.job.algorithm, turn.server, turn.sums, upload.message, float(weight))
        return upload._replace(message={}, apart=apart)

    @property
    def _most(self) -> float:
        return self.job.algorithm.bound or math.inf

    def fold_above(self, size: float, cohort: int) -> str:
        """Fold in uploads one by one if those of a cohort would take more bytes than `size`. Return what stands in the
        way, if anything does."""
        weights = self.state["weights"]
        of_one = sum(value.numel() * value.element_size() for value in weights.values())
        why = obstacle(self.job.algorithm, self.state) if cohort * of_one > size else ""
        self.folds = cohort * of_one > size and not why
        return f"{why}: a round needs {cohort} uploads of {of_one / 1e6:.0f} MB at once" if why else ""

    def _speak(self, turn: Round, client: int) -> protocol.Spoken:
        """Return the packet for a client. A rounded upload refers to it as well."""
        listener, algorithm = self._listener(client), self.job.algorithm
        if listener not in turn.spoken:
            key = protocol.broadcast_keys(algorithm.prior, turn.draws.of(client))
            turn.spoken[listener] = protocol.speak(algorithm, turn.server, key, turn.down)
            turn.floored |= floored(turn.spoken[listener].said)
        return turn.spoken[listener]

    def _listener(self, client: int) -> int:
        return client if self.job.algorithm.prior.per_client else -1

    def close(self, turn: Round, uploads: Mapping[int, Upload], evaluate: bool, seconds: float = 0.0) -> Record:
        """Take the M-step with the uploads that came back, and return the round's record."""
        began, job = time.perf_counter(), self.job
        examples = {client: upload.examples for client, upload in uploads.items()}
        found = self._m_step(turn, uploads)
        self.state, self.examples = found.server, self.examples | examples
        times = found.apart.tolist() if turn.sums is None else [upload.apart for upload in uploads.values()]
        self.left_out = left_out(list(uploads), times, job.algorithm.bound)
        turn.faults += self.left_out
        far = {fault["client"] for fault in self.left_out}
        used = {client: upload for client, upload in uploads.items() if client not in far}
        for client, upload in used.items():
            self.accepted[client] = turn.number
            for name, values in self.scores.items() if upload.scores else ():
                values[client] = upload.scores.get(name, math.nan)
        self.round = turn.number
        losses = [upload.loss for upload in (used or uploads).values()]
        record: Record = {"round": turn.number, "bytes_up": turn.bytes_up, "bytes_down": turn.bytes_down}
        record |= {"train_loss": sum(losses) / len(losses) if losses else math.nan, "clients": list(used)}
        record |= clip_of(turn.server)
        if spending := accountant_of(job.settings, job.clients):
            record["epsilon"] = spending.total(turn.number)
        if job.settings.weighting == "examples":
            record["examples"] = [upload.examples for upload in used.values()]
        kept = turn.floored | floored(turn.server) | {layer for u in used.values() for layer in u.floored}
        if kept:
            record["floored"] = sorted(kept)
        if forgot := [client for client, upload in used.items() if upload.forgot]:
            record["forgot"] = forgot
        record |= {name: seen for name in ("faults", "stragglers", "quarantined") if (seen := getattr(turn, name))}
        if evaluate:
            record |= self.evaluate()
            apart = [upload.disagreement for upload in used.values() if upload.disagreement is not None]
            if apart and job.algorithm.prior.gates(turn.server):
                record["tv_mean"] = sum(mean for mean, _ in apart) / len(apart)
                record["tv_max"] = max(most for _, most in apart)
        self.seconds += seconds + time.perf_counter() - began
        return record

    def _protected(self, turn: Round, heard: list[Tree]) -> tuple[Tree | Sums, Tree]:
        """What the server may learn from, and the server that does; in private, nobody is an answer as well."""
        if turn.sums is not None:
            return turn.sums, turn.server
        algorithm, server, key = self.job.algorithm, turn.server, self.private(turn).key(Purpose.NOISE)
        if not heard:
            return protocol.protect_nobody(algorithm, server, turn.draws, key)
        return protocol.protect(algorithm, server, trees.stack(heard), key)

    def private(self, turn: Round) -> Turn:
        """The source of a round's private draws."""
        return Turn(self.secret.to(self.root.device), turn.number)

    def evaluate(self) -> Record:
        """Return scores and size of the current server. Global scores need test examples at the server."""
        test, device = self.job.test, self.root.device
        workers = Workers(self.network, 1 if device.type != "cpu" else torch.get_num_threads())
        data = test.to(device) if test is not None else None
        what, scores = self.measures, self.scores
        if test is None and bool(self.accuracy.isnan().all()):  # no client has reported one
            what = what._replace(names=tuple(name for name in what.names if name not in ("accuracy", *PROBABILITIES)))
            scores = {name: scores[name] for name in what.names}
        record, self.clients = evaluate(self.job.algorithm, self.state, what, scores, workers, data)
        return record

    def _m_step(self, turn: Round, uploads: Mapping[int, Upload]) -> protocol.Conclusion:
        """Return the new state. If it is not finite, keep the old state and the old moments, as in the simulator."""
        counted = {client: one for client, one in uploads.items() if turn.sums is None or one.apart <= self._most}
        examples = {client: one.examples for client, one in counted.items()}
        known = {**self.examples, **examples}
        # Assume that a client that has not connected yet has as many examples as the others.
        usual = round(sum(known.values()) / max(1, len(known)))
        everyone = [known.get(client, usual) for client in range(self.job.clients)]
        weighting = "equal" if self.job.settings.private else self.job.settings.weighting
        part = share(weighting, list(examples.values()), everyone, self.root.device)
        rate = self.job.settings.rates.at(turn.number).server
        sent, server = self._protected(turn, [upload.message for upload in uploads.values()])
        return update(self.job.algorithm, server, sent, self.optimiser, part, turn.number, rate)

    def model(self) -> nn.Module:
        """Return the user's module with the server's weights, pruned; or an ensemble if the server has several."""
        return final_model(self.job.algorithm, self.state, self.network.module, self.measures.class_dim)

    def summary(self, records: list[Record]) -> Record:
        """Return totals and final values, as in the simulator, and how many replies were refused or missing."""
        name = self.job.algorithm.name
        return {
            "engine": "flower",
            **{"task": self.job.task, "algorithm": name, "label": name, "seed": self.job.settings.seed},
            **totals(self.job.algorithm, self.state, records),
            "faults": sum(len(record.get("faults", ())) for record in records),
            "seconds": round(self.seconds, 3),
            "device": self.root.device.type,
            "mode": "flower",
            "version": __version__,
        }
