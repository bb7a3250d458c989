"""Save a simulation to a checkpoint, and load it again."""

import json
from pathlib import Path
from typing import Any

import torch

from fedprior.core import storage
from fedprior.core.options import as_table, plain
from fedprior.core.settings import EXTENDS, MACHINE
from fedprior.engines.loop.round import Simulation

FORMAT = "fedprior-checkpoint-2"
DEPLOYED = "fedprior-flower-checkpoint-1"
"""What the server of real devices writes (`flower/server_checkpoint.py`)."""


def save(path: Path, simulation: Simulation, records: str = "") -> None:
    """Save everything that the next round depends on, and a checksum of the records so far."""
    moments = simulation.optimiser.state() if simulation.optimiser else {}
    tree: dict[str, Any] = {"server": simulation.server, "optimiser": moments}
    tree["memory"] = {str(client): remembered for client, remembered in simulation.memory.items()}
    tree["clients"] = simulation.scores
    text = json.dumps(_settings(simulation)).encode()
    tree["settings"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # as a tensor, the checksum covers it
    saved = storage.Saved(_identity(simulation), simulation.round, simulation.seconds, records, tree)
    storage.save(path, FORMAT, saved)


def load(path: Path, simulation: Simulation) -> str:
    """Restore the state of a simulation built from the same config; return the records' checksum."""
    saved = storage.load(path, FORMAT, _identity(simulation))
    with storage.fitting(path):
        found = {**saved.tree["server"]}
        if "usual" in simulation.server:  # a run that started without a bound, or with an older version
            found.setdefault("usual", simulation.server["usual"])
        server = storage.like(simulation.server, found, simulation.root.device)
        kept = saved.tree["clients"]  # an older version kept only accuracies
        scores = {name: storage.like(mine, kept.get(name, mine)) for name, mine in simulation.scores.items()}
        network = simulation.network
        blank = simulation.algorithm.remember(network.params(), network.statistics())
        memory = {int(client): storage.like(blank, found) for client, found in saved.tree.get("memory", {}).items()}
        if simulation.optimiser is not None:
            simulation.optimiser.load_state(storage.moments(saved.tree.get("optimiser", {})))
    simulation.server, simulation.scores, simulation.memory = server, scores, memory
    simulation.round, simulation.seconds = saved.round, saved.seconds
    return saved.records


def changes(path: Path, simulation: Simulation) -> list[str]:
    """The settings that are not those of the rounds before the checkpoint: `lambda0 = 0.0005, before 5e-06`."""
    text = storage.entry(path, "settings")
    before = {} if text is None else json.loads(text.numpy().tobytes())  # an older version kept none
    now = json.loads(json.dumps(_settings(simulation)))
    return [f"{name} = {now[name]}, before {was}" for name, was in before.items() if now.get(name, was) != was]


def load_deployed(path: Path, simulation: Simulation, run: str) -> None:
    """Put the state of a deployed server into a simulation built from the same config, to go on from there."""
    saved = storage.load(path, DEPLOYED, run)
    with storage.fitting(path):
        simulation.server = storage.like(simulation.server, saved.tree["state"], simulation.root.device)
    simulation.round, simulation.seconds = saved.round, saved.seconds


def _settings(simulation: Simulation) -> dict[str, Any]:
    """What a config may have been edited to: settings of the run, but for where and how long, and of the algorithm."""
    chosen = {name: plain(value) for name, value in vars(simulation.settings).items() if name not in MACHINE | EXTENDS}
    return {**chosen, **as_table(simulation.algorithm.settings)}


def _identity(simulation: Simulation) -> str:
    """Everything that must stay the same when a run is resumed; learning rates and the number of rounds may change."""
    algorithm = simulation.algorithm
    server = {section: optimiser.name for section, optimiser in (algorithm.server or {}).items()}
    return json.dumps({"algorithm": algorithm.name, "server": server, "key": int(simulation.root)})
