"""A whole run: rounds, records, checkpoints, summary."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedprior import trees
from fedprior.data import FederatedData
from fedprior.em import Algorithm
from fedprior.errors import DivergedError, SettingError
from fedprior.models import Ensemble, check_trainable
from fedprior.network import Network
from fedprior.simulate import checkpoint
from fedprior.simulate.attack import ATTACKS
from fedprior.simulate.batches import Schedule
from fedprior.simulate.cohort import MODES
from fedprior.simulate.folder import Record, RunFolder, checksum
from fedprior.simulate.round import Simulation, simulation
from fedprior.version import __version__

Progress = Callable[[Record], None]
"""Called after every round with its record."""


@dataclass(frozen=True)
class Settings:
    """How to run, whatever the algorithm."""

    rounds: int = 100
    seed: int = 0
    clients_per_round: int = 10
    batch_size: int = 32
    epochs: int = 1
    local_steps: int | None = None
    """Local steps a round, instead of epochs."""
    evaluate_every: int = 5
    """Evaluate the server every so many rounds, and after the last."""
    checkpoint_every: int | None = None
    """Save a checkpoint every so many rounds; none: about every 20 seconds."""
    mode: str = "auto"
    """`vectorised` over the cohort, or clients `in-turn`; auto: vectorised on a GPU."""
    workers: int | None = None
    """Clients in turn that train side by side on a CPU, a core each; none: as many as torch has threads."""
    device: str = "auto"
    wire: str = "encode"
    """`encode` every message to bytes and back, or only `count` its length."""
    attack: str = "none"
    """What hostile clients do: sign-flip, scale or constant."""
    attackers: float = 0.0
    """The share of clients that are hostile."""

    def __post_init__(self) -> None:
        for name in ("rounds", "clients_per_round", "batch_size", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("local_steps", "checkpoint_every", "workers"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mode not in ("auto", *MODES):
            raise SettingError(f"mode must be auto, {' or '.join(MODES)}, got {self.mode!r}")
        if self.wire not in ("encode", "count"):
            raise SettingError(f"wire must be encode or count, got {self.wire!r}")
        if self.attack not in ("none", *ATTACKS):
            raise SettingError(f"attack must be none, {', '.join(ATTACKS)}, got {self.attack!r}")
        if not 0 <= self.attackers < 1:
            raise SettingError(f"attackers must be at least 0 and below 1, got {self.attackers}")
        if not -(2**63) <= self.seed < 2**63:
            raise SettingError(f"seed must fit in 64 bits, got {self.seed}")

    def resolved_device(self) -> torch.device:
        """The device to run on."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise SettingError(f"device {self.device!r} is not available here") from error
        return device


@dataclass(frozen=True)
class Result:
    """What a run leaves: a line a round, a summary, and the server's model."""

    records: list[Record]
    summary: Record
    model: nn.Module
    """The server's network, pruned; where the server has several, their `Ensemble`."""
    simulation: Simulation
    path: Path | None


def build(algorithm: Algorithm, network: Network, data: FederatedData, settings: Settings) -> Simulation:
    """The simulation of a run before its first round."""
    check_trainable(network.module)
    if settings.clients_per_round > data.clients:
        raise SettingError(
            f"clients_per_round is {settings.clients_per_round}, but there are only {data.clients} clients"
        )
    device = settings.resolved_device()
    vectorised = settings.mode == "vectorised" or (settings.mode == "auto" and device.type != "cpu")
    if settings.mode == "vectorised" and not algorithm.vectorises:
        raise SettingError("this local optimiser does not act element by element, so clients must train in turn")
    schedule = Schedule(settings.batch_size, settings.epochs, settings.local_steps)
    return simulation(
        algorithm,
        network,
        data,
        schedule,
        clients_per_round=settings.clients_per_round,
        seed=settings.seed,
        vectorised=vectorised,
        workers=1 if device.type != "cpu" else settings.workers or torch.get_num_threads(),
        encode=settings.wire == "encode",
        attack=settings.attack,
        attackers=settings.attackers,
        device=device,
    )


def drive(
    sim: Simulation,
    settings: Settings,
    about: Mapping[str, Any],
    folder: RunFolder | None,
    records: list[Record],
    progress: Progress | None,
) -> Result:
    """Run the rounds that are left, and finish."""
    saved = time.monotonic()
    while sim.round < settings.rounds:
        last, seconds = sim.round + 1 == settings.rounds, sim.seconds
        try:
            record = sim.step(evaluate=last or (sim.round + 1) % settings.evaluate_every == 0)
        except DivergedError:
            if folder:
                checkpoint.save(folder.checkpoint, sim, checksum(records))
            raise
        records.append(record)
        if folder:
            folder.append(record)
            folder.append_time(sim.round, sim.seconds - seconds)
            due = (
                time.monotonic() - saved > 20
                if settings.checkpoint_every is None
                else sim.round % settings.checkpoint_every == 0
            )
            if due or last:
                checkpoint.save(folder.checkpoint, sim, checksum(records))
                saved = time.monotonic()
        if progress:
            progress(record)
    module = final_model(sim)
    summary = summarise(sim, records, about)
    if folder:
        folder.finish(summary, {name: p.detach() for name, p in module.named_parameters() if p.requires_grad})
    return Result(records, summary, module, sim, folder.path if folder else None)


def final_model(sim: Simulation) -> nn.Module:
    """The user's module with the server's weights, pruned; or an ensemble of as many as the server has."""
    models = sim.algorithm.prior.predict(sim.algorithm.prior.prune(sim.server))
    members = []
    for k in range(len(next(iter(models.values())))):
        member = copy.deepcopy(sim.network.module)
        member.load_state_dict(trees.row(models, k), strict=False)
        members.append(member.eval())
    return members[0] if len(members) == 1 else Ensemble(members).eval()


def summarise(sim: Simulation, records: list[Record], about: Mapping[str, Any]) -> Record:
    """Totals and final values."""
    last, prior = records[-1], sim.algorithm.prior
    server = prior.prune(sim.server)
    device = sim.root.device
    return {
        **about,
        "rounds": len(records),
        "global_accuracy": last["global_accuracy"],
        "local_accuracy": last["local_accuracy"],
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "sparsity": last["sparsity"],
        "parameters": trees.count(prior.predict(server)),
        "effective_parameters": prior.effective_parameters(server),
        "seconds": round(sim.seconds, 3),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "mode": "vectorised" if sim.vectorised else "in-turn",
        "version": __version__,
    }
