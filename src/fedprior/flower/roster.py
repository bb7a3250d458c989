"""Which devices are there, which client each of them is, and how each has behaved.

A device whose answer was of no use may have been upgraded or given another number, so it must introduce itself again
before it is asked anything. One whose answers are of no use again and again is left alone.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from flwr.app import Message

ASK_AGAIN = 30.0
"""Seconds before a node whose introduction was refused is greeted again, doubled each time."""
LONGEST = 900.0
"""The most seconds between two greetings."""


@dataclass
class Roster:
    """The nodes of one run, by Flower's number. Clients have numbers of their own, which nodes claim."""

    patience: int
    """After how many useless answers in a row a node is quarantined; 0 means never."""
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


def _wait(count: int) -> float:
    """Seconds to wait after this many refusals."""
    return min(ASK_AGAIN * 2 ** min(count - 1, 16), LONGEST) if count else 0.0
