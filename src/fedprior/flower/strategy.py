"""Hard EM as a Flower strategy: who takes part, what is sent, which replies count, when a round is over.

This is not a subclass of Flower's FedAvg, which averages arrays of equal shape: here the prior decides. The strategy
holds the server's whole state and does not use Flower's `arrays` argument.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import httpx
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedprior.core.errors import RunError, WireError
from fedprior.em import protocol
from fedprior.engines.server_state import Record
from fedprior.flower import messages
from fedprior.flower.job import Limits
from fedprior.flower.node import Order
from fedprior.flower.roster import Roster
from fedprior.flower.server import Round, Server, Upload

# Flower's logger: its messages reach `flwr log`.
log = logging.getLogger("flwr")
GONE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""Errors that Flower reports in place of a node that does not answer."""


class HardEM(Strategy):
    """One federated run on whatever nodes are connected."""

    def __init__(
        self,
        server: Server,
        limits: Limits,
        keep: Callable[[Record], None] = lambda record: None,
        asked: Mapping[str, Any] | None = None,
        bound: Mapping[int, int] | None = None,
    ) -> None:
        self.server, self.limits, self.keep = server, limits, keep
        self.asked = asked or {}
        """What a resumed run was started with. Devices know only the run config of the command that resumes it."""
        limits.check(server.job)
        self.min_replies = limits.needed(server.job.settings.clients_per_round)
        self.roster = Roster(limits.quarantine_after, bound or {})
        cohort = limits.asked(server.job.settings.clients_per_round)
        if why := server.fold_above(limits.keep_megabytes * 1e6, cohort):
            log.warning("%s", why)
        self._open()

    def _open(self) -> None:
        """Open the next round, with nothing sent and nothing received."""
        self.turn: Round = self.server.begin()
        self.attempt = 0
        self.cohort: list[int] = []
        self.tried: set[int] = set()
        self.sent: list[Message] = []
        self.good: dict[int, Upload] = {}
        self.found: dict[int, Upload] = {}
        self.started = time.monotonic()

    # ------------------------------------------------------------------ the run
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = 0.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all remaining rounds. Rounds and time limits come from the job, not from Flower's arguments."""
        self.summary()
        result = Result()
        rounds = self.server.job.settings.rounds
        cohort = self.limits.asked(self.server.job.settings.clients_per_round)
        least = min(self.limits.wait_for or cohort, self.server.job.clients)
        while self.server.round < rounds:
            record = self.run_round(grid, least)
            metrics = MetricRecord()
            metrics.update({key: value for key, value in record.items() if isinstance(value, (int, float))})
            result.train_metrics_clientapp[self.server.round] = metrics
            least = self.min_replies
        result.arrays = ArrayRecord(dict(self.server.model().state_dict()))
        return result

    def run_round(self, grid: Grid, least: int) -> Record:
        """Ask until there are enough good replies, but not forever."""
        number = self.turn.number
        while self.attempt < self.limits.attempts:
            self.meet(grid, least if self.attempt == 0 else self.min_replies)
            orders = self.configure_train(number, ArrayRecord(), ConfigRecord(), grid)
            self.aggregate_train(number, self.exchange(grid, orders))
            # In private, asking again would draw clients twice, and how many have answered must not matter.
            if len(self.good) >= self.min_replies or self.server.job.settings.private:
                return self._close()
            log.warning("round %d has %d good replies of at least %d", number, len(self.good), self.min_replies)
        raise RunError(
            f"round {number} had {len(self.good)} good replies after {self.limits.attempts} attempts, "
            f"{self.min_replies} are needed. The state before it is kept: repair the nodes and start again with resume="
        )

    def exchange(self, grid: Grid, orders: Iterable[Message]) -> Iterator[Message]:
        """Send the messages, and return the replies, each when it arrives."""
        return self._replies(grid, _push(grid, list(orders)))

    def _replies(self, grid: Grid, waiting: dict[str, Message]) -> Iterator[Message]:
        """Yield what arrives until there are enough good replies or time is up; what is there already counts, too."""
        deadline = time.monotonic() + self.limits.round_seconds
        while waiting and time.monotonic() < deadline:
            yield from _pull(grid, waiting)
            if self._enough():
                return
            if waiting:
                time.sleep(self.limits.poll_seconds)

    def _enough(self) -> bool:
        """Whether the round may close without those that have not answered."""
        if self.server.job.settings.private:  # the first to answer are no Poisson sample: one would displace another
            return False
        cohort = min(self.server.job.settings.clients_per_round, len(self.cohort) + len(self.good))
        return len({*self.good, *self.found}) >= max(self.limits.enough(cohort), self.min_replies)

    # ------------------------------------------------------------------ who is there
    def meet(self, grid: Grid, least: int) -> None:
        """Let new nodes introduce themselves, and wait until at least `least` clients are connected."""
        deadline = time.monotonic() + self.limits.start_seconds
        while True:
            self._greet(grid, self.roster.see(set(grid.get_node_ids()), time.monotonic()))
            self._introductions(_pull(grid, dict(self.roster.asked)))
            there = len({*self.roster.clients.values(), *self.good})
            if there >= least:
                return
            if time.monotonic() > deadline:
                if there >= self.min_replies:
                    log.warning("continuing with %d clients after waiting for %d", there, least)
                    return
                raise RunError(
                    f"only {there} clients have connected in {self.limits.start_seconds:g} s, "
                    f"{self.min_replies} are needed; see docs/deployment.md for what to check"
                )
            time.sleep(self.limits.poll_seconds)

    def _greet(self, grid: Grid, nodes: list[int]) -> None:
        ttl = self.limits.start_seconds + self.limits.round_seconds
        content = messages.write_asked(self.asked)
        self.roster.asked |= _push(grid, [Message(content, node, MessageType.QUERY, ttl=ttl) for node in nodes])

    def _introductions(self, replies: Iterable[Message]) -> None:
        for reply in replies:
            greeting = self.roster.asked.pop(reply.metadata.reply_to_message_id, None)
            if greeting is None:
                continue
            node = greeting.metadata.dst_node_id
            try:
                client, examples = messages.check_introduction(_content(reply), self.server, self.turn, self.limits)
                self.roster.check(node, client)
            except Exception as error:  # whatever a foreign machine sends, the run goes on
                self.roster.turn_away(node, time.monotonic())
                self._fault(node, None, error)
                continue
            log.info("node %d is client %d", node, client)
            self.roster.welcome(node, client)
            self.server.examples[client] = examples

    # ------------------------------------------------------------------ a round
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages for a cohort of the connected clients."""
        self.cohort = self._choose()
        self.tried |= set(self.cohort)
        self.attempt += 1
        nodes, turn = {client: node for node, client in self.roster.clients.items()}, self.turn
        self.sent = []
        for client in self.cohort:
            packet = self.server.packet(turn, client)
            turn.bytes_down += len(packet)
            order = Order(packet, turn.number, self.server.run, self.server.accepted.get(client, 0))
            content, group = messages.write_order(order, self.asked), str(turn.number)
            ttl = self.limits.round_seconds + 10  # our own limit comes first
            self.sent.append(Message(content, nodes[client], MessageType.TRAIN, ttl=ttl, group_id=group))
        return self.sent

    def _choose(self) -> list[int]:
        """Choose the clients to ask: first the simulator's cohort, if all are connected; then others in their place."""
        there = sorted(set(self.roster.clients.values()) - self.good.keys())
        job = self.server.job
        if job.settings.private:
            drawn = job.clients, job.settings.clients_per_round
            return [
                one for one in protocol.cohort(self.server.private(self.turn), *drawn, private=True) if one in there
            ]
        pool = [client for client in there if client not in self.tried] or there
        missing = self.server.job.settings.clients_per_round - len(self.good)
        count = min(self.limits.asked(missing), len(pool))
        return [pool[i] for i in protocol.cohort(self.turn.draws, len(pool), count, self.attempt)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Separate good replies from bad ones. The M-step follows in `start`, which may ask for more first."""
        # Match replies by the message they answer: Flower's own error replies name the server as their source.
        expected = {message.metadata.message_id: message.metadata.dst_node_id for message in self.sent}
        clients = dict(self.roster.clients)
        answered: set[str] = set()
        self.found = {}
        for reply in replies:
            name = reply.metadata.reply_to_message_id
            node = expected.get(name, reply.metadata.src_node_id)
            client, again = clients.get(node), name in answered
            try:
                self.turn.bytes_up += messages.payload_bytes(reply)
                if name not in expected or client is None:
                    raise WireError("a reply that was not requested")
                if again:
                    raise WireError("a second reply to the same message")
                answered.add(name)
                self.found[client] = self._read(client, reply)
                self.roster.trust(node)
            except Exception as error:  # whatever a foreign machine sends, the run goes on with the others
                self._fault(node, client, error)
                if reply.has_error() and reply.error.code in GONE:
                    self.roster.clients.pop(node, None)
                elif name in expected and not again and self.roster.refuse(node, time.monotonic()):
                    self._quarantine(node, client)
            del reply  # it may be as large as the model, and the next one is on its way
            if self.server.folds:
                gc.collect()  # Flower's records refer to themselves, and the collector does not know how large they are
        self._without([node for name, node in expected.items() if name not in answered])
        # Use the cohort's order, not the order of arrival: a sum of floats depends on it.
        self.good |= {client: self.found[client] for client in self.cohort if client in self.found}
        self.sent, self.found = [], {}
        return None, None

    def _read(self, client: int, reply: Message) -> Upload:
        """Check a reply, and take its upload. Nothing else may hold on to that, or memory grows with the cohort."""
        upload = messages.read_answer(_content(reply), client, self.server, self.turn, self.limits)
        return self.server.receive(self.turn, upload)

    def _without(self, nodes: list[int]) -> None:
        """Go on without these nodes, which have not answered, and do not ask them until they answer a greeting: they
        may still be at work, or dead, which Flower notices only after a minute."""
        enough = self._enough()
        for node in nodes:
            client = self.roster.clients.pop(node, None)
            if enough and client is not None:
                log.info("node %d (client %d) has not answered in time: its work is not used", node, client)
                self.turn.stragglers.append(client)
            else:
                self._fault(node, client, WireError(f"no reply in {self.limits.round_seconds:g} s"))

    def _close(self) -> Record:
        settings, number = self.server.job.settings, self.turn.number
        evaluate = number == settings.rounds or number % settings.evaluate_every == 0
        record = self.server.close(self.turn, self.good, evaluate, time.monotonic() - self.started)
        for fault in self.server.left_out:
            log.warning("client %s: %s", fault["client"], fault["what"])
        self.keep(record)
        log.info("round %d: %d clients, loss %.4f", number, len(record["clients"]), record["train_loss"])
        self._open()
        return record

    def _quarantine(self, node: int, client: int | None) -> None:
        log.warning(
            "node %d (client %s) is quarantined after %d useless answers in a row; a resumed run asks it again",
            *(node, client, self.limits.quarantine_after),
        )
        self.turn.quarantined.append({"node": str(node), "client": client})

    def _fault(self, node: int, client: int | None, error: Exception) -> None:
        kind = "" if isinstance(error, WireError) else f"{type(error).__name__}: "
        # Keep to one line without control characters: this text comes from a foreign machine and ends up in a terminal.
        words = " ".join(f"{kind}{error}".split())[:300]
        what = "".join(letter if letter.isprintable() else "?" for letter in words)
        log.warning("node %d (client %s): %s", node, "?" if client is None else client, what)
        self.turn.faults.append({"node": str(node), "client": client, "what": what})

    # ------------------------------------------------------------------ what else Flower's interface requires
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Do nothing: a client tests the model it sends, and the server tests its own."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Do nothing."""
        return None

    def summary(self) -> None:
        job = self.server.job
        log.info("%s on %s, rounds %d to %d", job.algorithm.name, job.task, self.server.round + 1, job.settings.rounds)


def _push(grid: Grid, messages: list[Message]) -> dict[str, Message]:
    """Send the messages. Return those that Flower accepted, by the ids used to pull their replies."""
    names = grid.push_messages(messages) if messages else []
    return {str(name): message for name, message in zip(names, messages, strict=False) if name}


def _pull(grid: Grid, waiting: dict[str, Message]) -> Iterator[Message]:
    """Yield the replies that have come back, pulled one message at a time: each may be as large as the model. What has
    been answered is no longer waited for.

    Flower unpacks a reply while pulling it, guided by the reply itself. If one cannot be unpacked, all replies pulled
    with it are lost. If one names another message, it would pass for another node's reply.
    """
    for name, message in list(waiting.items()):
        try:
            replies = list(grid.pull_messages([name]))
            if any(reply.metadata.reply_to_message_id != name for reply in replies):
                raise WireError("the reply says that it answers another message")
        except httpx.HTTPError:  # the fault of our own SuperLink, not of the node
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, WireError) else f"the reply cannot be unpacked: {error!r}"
            replies = [Message(Error(code=ErrorCode.UNKNOWN, reason=reason), reply_to=message)]
        if replies:
            del waiting[name]
        while replies:  # nothing here holds on to a reply that has been read
            yield replies.pop(0)


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise WireError(f"error {reply.error.code}: {str(reply.error.reason)[:250]}")
    if not reply.has_content():
        raise WireError("the reply is empty")
    return reply.content
