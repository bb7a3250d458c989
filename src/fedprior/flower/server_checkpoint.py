"""What a checkpoint of a deployed server holds; there is one after every round."""

import json
from pathlib import Path

from fedprior.core import storage
from fedprior.flower.server import Server
from fedprior.runs.checkpoint import DEPLOYED as FORMAT


def save(path: Path, server: Server, records: str) -> None:
    """Save everything that the next round depends on, and a checksum of the records so far."""
    moments = server.optimiser.state() if server.optimiser else {}
    tree = {"state": server.state, "moments": moments, "clients": server.scores}
    known = {"accepted": server.accepted, "examples": server.examples}
    more = {name: json.dumps(list(numbers.items())) for name, numbers in known.items()}
    storage.save(path, FORMAT, storage.Saved(server.run, server.round, server.seconds, records, tree, more))


def load(path: Path, server: Server) -> str:
    """Restore the checkpoint into a server built from the same config, and return the records' checksum."""
    saved = storage.load(path, FORMAT, server.run)
    with storage.reading(path):
        accepted = dict(json.loads(saved.more["accepted"]))
        examples = dict(json.loads(saved.more.get("examples", "[]")))
    with storage.fitting(path):
        found = {**saved.tree["state"]}
        if "usual" in server.state:  # a run that started without a bound, or with an older version
            found.setdefault("usual", server.state["usual"])
        state = storage.like(server.state, found, server.root.device)
        kept = saved.tree["clients"]  # an older version kept only accuracies
        scores = {name: storage.like(mine, kept.get(name, mine)) for name, mine in server.scores.items()}
        if server.optimiser is not None:
            server.optimiser.load_state(storage.moments(saved.tree.get("moments", {})))
    server.state, server.scores = state, scores
    server.accepted, server.examples = accepted, examples
    server.round, server.seconds = saved.round, saved.seconds
    return saved.records
