"""Which devices are there, which client each of them is, and how each has behaved.

A device whose answer was of no use may have been upgraded or given another number, so it must introduce itself again
before it is asked anything. One whose answers are of no use again and again is left alone.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from fedprior.core.errors import SettingError, WireError

ASK_AGAIN = 30.0
"""Seconds before a node whose introduction was refused is greeted again, doubled each time."""
LONGEST = 900.0
"""The most seconds between two greetings."""


@dataclass
class Roster:
    """The nodes of one run, by Flower's number. Clients have numbers of their own, which nodes claim."""

    patience: int
    """After how many useless answers in a row a node is quarantined; 0 means never."""
    bound: Mapping[int, int] = field(default_factory=dict)
    """Which client each node must be; if empty, any node may be any client."""
    clients: dict[int, int] = field(default_factory=dict)
    """Which client each node is, for the nodes that have introduced themselves."""
    asked: dict[str, Message] = field(default_factory=dict)
    """Greetings that have not been answered yet, by message id."""
    again: dict[int, float] = field(default_factory=dict)
    """When to greet a node again that was refused."""
    turned_away: dict[int, int] = field(default_factory=dict)
    """How many introductions in a row were refused."""
    useless: dict[int, int] = field(default_factory=dict)
    """How many answers in a row were of no use. A node does not clear this by leaving and coming back."""
    quarantined: set[int] = field(default_factory=set)
    """The nodes that this run asks nothing any more."""

    def see(self, online: Collection[int], now: float) -> list[int]:
        """Forget the nodes that have left, and return those to greet."""
        for known in (self.clients, self.again, self.turned_away):
            for node in known.keys() - set(online):
                del known[node]
        self.asked = {name: m for name, m in self.asked.items() if m.metadata.dst_node_id in online}
        asked = {message.metadata.dst_node_id for message in self.asked.values()}
        later = {node for node, when in self.again.items() if now < when}
        return sorted(set(online) - self.clients.keys() - asked - later - self.quarantined)

    def check(self, node: int, client: int) -> None:
        """Refuse a node that speaks for another client than its own, or for one that is taken."""
        if self.bound and node not in self.bound:
            raise WireError(f"the node says it is client {client}, but is not one of `devices`")
        if self.bound and self.bound[node] != client:
            raise WireError(f"the node says it is client {client}, but its key is that of client {self.bound[node]}")
        if client in self.clients.values():
            # It may be the same device after a crash, before Flower has noticed that its old node is gone.
            raise WireError("another node is already this client")

    def welcome(self, node: int, client: int) -> None:
        """A node has introduced itself as this client."""
        self.clients[node] = client
        self.again.pop(node, None)
        self.turned_away.pop(node, None)

    def turn_away(self, node: int, now: float) -> None:
        """An introduction was refused: greet the node again later, because it may be upgraded meanwhile."""
        count = self.turned_away[node] = self.turned_away.get(node, 0) + 1
        self.again[node] = now + _wait(count)

    def trust(self, node: int) -> None:
        """An answer was good."""
        self.useless.pop(node, None)

    def refuse(self, node: int, now: float) -> bool:
        """An answer was of no use. The first time, greet the node at once. Return whether it is now quarantined."""
        self.clients.pop(node, None)
        count = self.useless[node] = self.useless.get(node, 0) + 1
        self.again[node] = now + _wait(count - 1)
        if self.patience and count >= self.patience and node not in self.quarantined:
            self.quarantined.add(node)
            return True
        return False


def read_devices(text: str, clients: int) -> dict[int, int]:
    """Read `NODE=CLIENT; NODE=CLIENT`, with the numbers that Flower gave to the nodes when they were registered."""
    bound: dict[int, int] = {}
    for pair in filter(None, (pair.strip() for pair in text.replace("\n", ";").split(";"))):
        node, _, client = (part.strip() for part in pair.partition("="))
        if not (node.isdecimal() and client.isdecimal()):
            raise SettingError(f"devices are written NODE=CLIENT; NODE=CLIENT, got {pair[:40]!r}")
        if int(node) in bound or int(client) in bound.values():
            raise SettingError(f"devices name a node or a client twice: {pair[:40]!r}")
        if int(client) >= clients:
            raise SettingError(f"devices have client {client}, but the job's clients are 0 to {clients - 1}")
        bound[int(node)] = int(client)
    return bound


def _wait(count: int) -> float:
    """Seconds to wait after this many refusals."""
    return min(ASK_AGAIN * 2 ** min(count - 1, 16), LONGEST) if count else 0.0
