"""Hard EM as a Flower strategy: who takes part, what is sent, which replies count, when a round is over.

This is not a subclass of Flower's FedAvg, which averages arrays of equal shape: here the prior decides. The strategy
holds the server's whole state and does not use Flower's `arrays` argument.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

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
from fedprior.flower.server import Round, Server, Upload

# Flower's logger: its messages reach `flwr log`.
log = logging.getLogger("flwr")
ASK_AGAIN = 30.0
"""Seconds before a node whose introduction failed is asked again."""
GONE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""Errors that Flower reports in place of a node that does not answer."""


class HardEM(Strategy):
    """One federated run on whatever nodes are connected."""

    def __init__(self, server: Server, limits: Limits, keep: Callable[[Record], None] = lambda record: None) -> None:
        self.server, self.limits, self.keep = server, limits, keep
        self.min_replies = limits.needed(server.job.settings.clients_per_round)
        self.clients: dict[int, int] = {}
        """Which client each node is, for the nodes that have introduced themselves."""
        self.asked: dict[str, Message] = {}
        """Greetings that have not been answered yet, by message id."""
        self.again: dict[int, float] = {}
        """When to ask a node again whose introduction failed; never if it has another model."""
        self._open()

    def _open(self) -> None:
        """Open the next round, with nothing sent and nothing received."""
        self.turn: Round = self.server.begin()
        self.attempt = 0
        self.cohort: list[int] = []
        self.tried: set[int] = set()
        self.sent: list[Message] = []
        self.good: dict[int, Upload] = {}
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
        least = min(self.limits.wait_for or self.server.job.settings.clients_per_round, self.server.job.clients)
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
            if len(self.good) >= self.min_replies:
                return self._close()
            log.warning("round %d has %d good replies of at least %d", number, len(self.good), self.min_replies)
        raise RunError(
            f"round {number} had {len(self.good)} good replies after {self.limits.attempts} attempts, "
            f"{self.min_replies} are needed. The state before it is kept: repair the nodes and start again with resume="
        )

    def exchange(self, grid: Grid, orders: Iterable[Message]) -> list[Message]:
        """Send the messages, and collect replies until all have arrived or time is up."""
        replies: list[Message] = []
        waiting = _push(grid, list(orders))
        deadline = time.monotonic() + self.limits.round_seconds
        while waiting and time.monotonic() < deadline:
            new = _pull(grid, waiting)
            replies += new
            for reply in new:
                waiting.pop(reply.metadata.reply_to_message_id, None)
            if waiting:
                time.sleep(self.limits.poll_seconds)
        return replies

    # ------------------------------------------------------------------ who is there
    def meet(self, grid: Grid, least: int) -> None:
        """Let new nodes introduce themselves, and wait until at least `least` clients are connected."""
        deadline = time.monotonic() + self.limits.start_seconds
        while True:
            online = set(grid.get_node_ids())
            self.clients = {node: client for node, client in self.clients.items() if node in online}
            self.asked = {name: m for name, m in self.asked.items() if m.metadata.dst_node_id in online}
            self.again = {node: when for node, when in self.again.items() if node in online}
            later = {node for node, when in self.again.items() if time.monotonic() < when}
            asked = {message.metadata.dst_node_id for message in self.asked.values()}
            self._greet(grid, online - self.clients.keys() - asked - later)
            self._introductions(_pull(grid, self.asked))
            there = len({*self.clients.values(), *self.good})
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

    def _greet(self, grid: Grid, nodes: set[int]) -> None:
        ttl = self.limits.start_seconds + self.limits.round_seconds
        self.asked |= _push(grid, [Message(RecordDict(), node, MessageType.QUERY, ttl=ttl) for node in sorted(nodes)])

    def _introductions(self, replies: Iterable[Message]) -> None:
        for reply in replies:
            greeting = self.asked.pop(reply.metadata.reply_to_message_id, None)
            if greeting is None:
                continue
            node = greeting.metadata.dst_node_id
            self.again[node] = time.monotonic() + ASK_AGAIN
            try:
                content = _content(reply)
                self.again[node] = math.inf  # until it passes the check
                client, examples = messages.check_introduction(content, self.server, self.turn, self.limits)
                self.again[node] = time.monotonic() + ASK_AGAIN
                if client in self.clients.values():
                    # It may be the same device after a crash, before Flower has noticed that its old node is gone.
                    raise WireError("another node is already this client")
            except Exception as error:  # whatever a foreign machine sends, the run goes on
                self._fault(node, None, error)
                continue
            del self.again[node]
            log.info("node %d is client %d", node, client)
            self.clients[node] = client
            self.server.examples[client] = examples

    # ------------------------------------------------------------------ a round
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages for a cohort of the connected clients."""
        self.cohort = self._choose()
        self.tried |= set(self.cohort)
        self.attempt += 1
        nodes, turn = {client: node for node, client in self.clients.items()}, self.turn
        self.sent = []
        for client in self.cohort:
            packet = self.server.packet(turn, client)
            turn.bytes_down += len(packet)
            order = Order(packet, turn.number, self.server.run, self.server.accepted.get(client, 0))
            content, group = messages.write_order(order), str(turn.number)
            ttl = self.limits.round_seconds + 10  # our own limit comes first
            self.sent.append(Message(content, nodes[client], MessageType.TRAIN, ttl=ttl, group_id=group))
        return self.sent

    def _choose(self) -> list[int]:
        """Choose the clients to ask: first the simulator's cohort, if all are connected; then others in their place."""
        there = sorted(set(self.clients.values()) - self.good.keys())
        pool = [client for client in there if client not in self.tried] or there
        count = min(self.server.job.settings.clients_per_round - len(self.good), len(pool))
        return [pool[i] for i in protocol.cohort(self.turn.draws, len(pool), count, self.attempt)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Separate good replies from bad ones. The M-step follows in `start`, which may ask for more first."""
        # Match replies by the message they answer: Flower's own error replies name the server as their source.
        expected = {message.metadata.message_id: message.metadata.dst_node_id for message in self.sent}
        answered: set[str] = set()
        found: dict[int, Upload] = {}
        for reply in replies:
            name = reply.metadata.reply_to_message_id
            node = expected.get(name, reply.metadata.src_node_id)
            client = self.clients.get(node)
            try:
                self.turn.bytes_up += messages.payload_bytes(reply)
                if name not in expected or client is None:
                    raise WireError("a reply that was not requested")
                if name in answered:
                    raise WireError("a second reply to the same message")
                answered.add(name)
                found[client] = messages.read_answer(_content(reply), client, self.server, self.turn, self.limits)
            except Exception as error:  # whatever a foreign machine sends, the round goes on with the others
                self._fault(node, client, error)
                if reply.has_error() and reply.error.code in GONE:
                    self.clients.pop(node, None)
        for name in expected.keys() - answered:
            # Flower notices a dead node only after a minute. Do not ask this one until it answers a greeting.
            node = expected[name]
            silence = WireError(f"no reply in {self.limits.round_seconds:g} s")
            self._fault(node, self.clients.pop(node, None), silence)
        # Use the cohort's order, not the order of arrival: a sum of floats depends on it.
        self.good |= {client: found[client] for client in self.cohort if client in found}
        self.sent = []
        return None, None

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


def _pull(grid: Grid, waiting: Mapping[str, Message]) -> list[Message]:
    """Pull the replies that have come back, one message at a time.

    Flower unpacks a reply while pulling it, guided by the reply itself. If one cannot be unpacked, all replies pulled
    with it are lost. If one names another message, it would pass for another node's reply.
    """
    replies: list[Message] = []
    for name, message in waiting.items():
        try:
            for reply in grid.pull_messages([name]):
                if reply.metadata.reply_to_message_id != name:
                    raise WireError("the reply says that it answers another message")
                replies.append(reply)
        except httpx.HTTPError:  # the fault of our own SuperLink, not of the node
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, WireError) else f"the reply cannot be unpacked: {error!r}"
            replies.append(Message(Error(code=ErrorCode.UNKNOWN, reason=reason), reply_to=message))
    return replies


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise WireError(f"error {reply.error.code}: {str(reply.error.reason)[:250]}")
    if not reply.has_content():
        raise WireError("the reply is empty")
    return reply.content
