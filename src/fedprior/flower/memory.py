"""What a client remembers between its turns (SCAFFOLD's control variates), on its own disk.

Flower's own `context.state` dies with the SuperNode. And a client cannot know whether its upload was used: it may have
come too late, or the server may have gone back to its last checkpoint. So the client keeps each turn beside the one
before it, and the server's next message says which round's upload it last used.
"""

import re
from pathlib import Path

import safetensors

from fedprior.core import storage, trees
from fedprior.core.errors import WireError
from fedprior.core.files import write_atomically, writing
from fedprior.core.trees import Tree

_RUN = re.compile(r"[0-9a-f]{16}")


def check_run(run: object) -> str:
    """Check a run's name. It becomes part of a path, so it must look exactly like the names our servers draw."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise WireError("the server's message names no run")
    return run


class Memory:
    """A client's last two turns in one run."""

    def __init__(self, folder: Path, run: str, client: int, blank: Tree) -> None:
        self.path = folder / check_run(run) / f"client-{client}.safetensors"
        self.blank = blank
        """The memory before the first turn. If the algorithm remembers nothing, it is empty and no file is made."""
        self.turns: dict[int, Tree] = {}
        self.lost = False
        """Whether the server used an upload that this client knows nothing about, for example with a new disk."""

    def recall(self, accepted: int) -> Tree:
        """Return the memory after the turn that the server last used; 0 means none yet."""
        if not self.blank:
            return self.blank
        saved = self._load() if accepted else {}
        self.turns = {accepted: saved[accepted]} if accepted in saved else {}
        self.lost = accepted > 0 and not self.turns
        return self.turns.get(accepted, self.blank)

    def keep(self, number: int, memory: Tree) -> None:
        """Remember this turn beside the last one that the server used."""
        if not self.blank:
            return
        flat = dict(trees.leaves({str(turn): tree for turn, tree in {**self.turns, number: memory}.items()}))
        with writing(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self.path, storage.to_bytes(flat))

    def _load(self) -> dict[int, Tree]:
        """Read all turns from disk; none if the file is missing, damaged or from another model."""
        try:
            turns = storage.from_bytes(self.path.read_bytes())
            return {int(turn): storage.like(self.blank, memory) for turn, memory in turns.items()}
        except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError):
            return {}
