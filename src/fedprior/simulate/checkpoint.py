"""A simulation on disk: tensors in a safetensors file, nothing pickled, replaced atomically."""

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fedprior import trees
from fedprior.errors import RunError
from fedprior.simulate.round import Simulation

FORMAT = "fedprior-checkpoint-1"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file at once: after a crash there is the old one or the new one, never half of one."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save(path: Path, simulation: Simulation) -> None:
    """Everything that the next round depends on."""
    tensors, numbers = _split(_state(simulation))
    about = {
        "format": FORMAT,
        "round": str(simulation.round),
        "seconds": repr(simulation.seconds),
        "numbers": json.dumps(numbers),
    }
    # safetensors wants memory of its own for every tensor.
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_atomically(path, safetensors.torch.save(plain, about))


def load(path: Path, simulation: Simulation) -> None:
    """Put a simulation built from the same config where the checkpoint left it."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise RunError(f"{path} is not a fedprior checkpoint")
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            numbers, number, seconds = json.loads(about["numbers"]), int(about["round"]), float(about["seconds"])
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error})") from error
    _restore(path, simulation, tensors, numbers)
    simulation.round, simulation.seconds = number, seconds


def _state(simulation: Simulation) -> dict[str, Any]:
    moments = simulation.optimiser.state() if simulation.optimiser else {}
    return {"server": simulation.server, "optimiser": moments, "accuracy": {"clients": simulation.accuracy}}


def _split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain numbers apart: optimisers keep both."""
    flat = dict(trees.leaves(state))
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def _restore(path: Path, simulation: Simulation, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    device = simulation.root.device
    sections: dict[str, dict[str, dict[str, Any]]] = {"server": {}, "optimiser": {}, "accuracy": {}}
    for name, value in (tensors | numbers).items():
        part, section, leaf = ([*name.split("/", 2), ""])[:3]
        if part not in sections:
            raise RunError(f"{path} holds {name!r}, which this version does not know")
        sections[part].setdefault(section, {})[leaf] = value
    server = {
        section: {name: value.to(device) for name, value in leaves.items()}
        for section, leaves in sections["server"].items()
    }
    accuracy = tensors.get("accuracy/clients")
    expected = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in trees.leaves(simulation.server)}
    found = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in trees.leaves(server)}
    if (
        any(found.get(name) != kind for name, kind in expected.items())
        or accuracy is None
        or accuracy.shape != simulation.accuracy.shape
    ):
        raise RunError(f"{path} belongs to another model, algorithm or task than its config.toml says")
    simulation.server, simulation.accuracy = server, accuracy
    if simulation.optimiser is not None:
        simulation.optimiser.load_state(sections["optimiser"])
