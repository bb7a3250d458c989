"""A federation inside one process: a grid whose nodes are ClientApps, called when the strategy pulls their replies."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedprior.flower import Job, client_app

Tamper = Callable[[Message, Message], list[Message]]
"""From an order and its honest reply to what arrives."""


class LocalGrid(Grid):
    """Nodes 1000, 1001, …: node 1000 + i is client i."""

    def __init__(self, job: Job, folder: Path, tamper: Tamper | None = None, clients: Iterable[int] | None = None):
        self.app = client_app(lambda config: job)
        self.folder = folder
        self.tamper = tamper
        self.nodes = {1000 + i: i for i in (range(job.clients) if clients is None else clients)}
        self.waiting: dict[str, Message] = {}
        self.count = 0
        # Flower sets these in a server's process, and no message can be made without.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def push_messages(self, messages):
        names = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = name = f"m{self.count}"
            self.waiting[name] = message
            names.append(name)
        return names

    def pull_messages(self, message_ids):
        replies = []
        for name in sorted(message_ids, key=lambda name: -int(name[1:])):  # never in the order of the cohort
            order = self.waiting.get(name)
            if order is None or order.metadata.dst_node_id not in self.nodes:
                continue
            del self.waiting[name]
            reply = self.app(order, self.context(order.metadata.dst_node_id))
            replies += [reply] if self.tamper is None else self.tamper(order, reply)
        return replies

    def context(self, node: int) -> Context:
        config = {"partition-id": self.nodes[node], "state-dir": str(self.folder / "state")}
        return Context(1, node, config, RecordDict(), {})

    def get_node_ids(self):
        return list(self.nodes)

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


class Slow(LocalGrid):
    """Some devices answer only when the server has looked so many times."""

    def __init__(self, job: Job, folder: Path, slow: Mapping[int, int]):
        super().__init__(job, folder)
        self.slow: Mapping[int, int] = slow
        """How many times, by client."""
        self.seen: Counter[str] = Counter()

    def pull_messages(self, message_ids):
        ready = []
        for name in message_ids:
            order = self.waiting.get(name)
            if order is not None and order.metadata.message_type == "train":
                self.seen[name] += 1
                if self.seen[name] < self.slow.get(self.nodes[order.metadata.dst_node_id], 0):
                    continue
            ready.append(name)
        return super().pull_messages(ready)
