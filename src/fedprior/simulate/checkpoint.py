"""A simulation on disk: tensors in a safetensors file, nothing pickled, replaced atomically."""

import json
import os
import zlib
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


def save(path: Path, simulation: Simulation, records: str = "") -> None:
    """Everything that the next round depends on, and a checksum of the records that led here."""
    tensors, numbers = _split(_state(simulation))
    # safetensors wants memory of its own for every tensor.
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    about = {
        "format": FORMAT,
        "run": _identity(simulation),
        "round": str(simulation.round),
        "seconds": repr(simulation.seconds),
        "numbers": json.dumps(numbers),
        "checksum": _checksum(plain),
        "records": records,
    }
    write_atomically(path, safetensors.torch.save(plain, about))


def load(path: Path, simulation: Simulation) -> str:
    """Put a simulation built from the same config where the checkpoint left it; return the records' checksum."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise RunError(f"{path} is not a fedprior checkpoint")
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            numbers, number, seconds = json.loads(about["numbers"]), int(about["round"]), float(about["seconds"])
            identity, checksum, records = about["run"], about["checksum"], str(about["records"])
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error})") from error
    if checksum != _checksum(tensors):
        raise RunError(f"{path} is damaged: its checksum does not match")
    if identity != _identity(simulation):
        raise RunError(f"{path} belongs to another run than its config.toml says ({identity})")
    _restore(path, simulation, tensors, numbers)
    simulation.round, simulation.seconds = number, seconds
    return records


def _identity(simulation: Simulation) -> str:
    """What must not change between two sessions of a run; learning rates and the number of rounds may."""
    algorithm = simulation.algorithm
    server = {section: optimiser.name for section, optimiser in (algorithm.server or {}).items()}
    return json.dumps({"algorithm": algorithm.name, "server": server, "key": int(simulation.root)})


def _checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of all tensors: safetensors has none of its own."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return str(total)


def _state(simulation: Simulation) -> dict[str, Any]:
    moments = simulation.optimiser.state() if simulation.optimiser else {}
    memory = {str(client): remembered for client, remembered in simulation.memory.items()}
    clients = {"accuracy": simulation.accuracy}
    return {"server": simulation.server, "optimiser": moments, "memory": memory, "clients": clients}


def _split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain numbers apart: optimisers keep both."""
    flat = dict(trees.leaves(state))
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def _restore(path: Path, simulation: Simulation, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    tree = _nested(tensors | numbers)
    try:
        # In the simulation's own order, because sums over parameters depend on it in the last bit.
        here = trees.tree_map(lambda leaf: leaf.to(simulation.root.device), tree.pop("server"))
        server = _like(simulation.server, here)
        accuracy = tree.pop("clients")["accuracy"]
        blank = simulation.algorithm.correction.remember(simulation.network.params())
        memory = {int(client): _like(blank, remembered) for client, remembered in tree.pop("memory", {}).items()}
        if accuracy.shape != simulation.accuracy.shape:
            raise ValueError(accuracy.shape)
        if simulation.optimiser is not None:
            simulation.optimiser.load_state(_moments(tree.pop("optimiser", {})))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"{path} belongs to another model, algorithm or task than its config.toml says") from error
    simulation.server, simulation.accuracy, simulation.memory = server, accuracy, memory


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `trees.leaves`: no name in a tree holds a slash."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return tree


def _like(model: Any, found: Any) -> Any:
    """`found` in the order of `model`; sections that only `found` has come last."""
    if isinstance(model, dict):
        extra = {name: child for name, child in found.items() if name not in model}
        return {name: _like(child, found[name]) for name, child in model.items()} | extra
    if found.shape != model.shape or found.dtype != model.dtype:
        raise ValueError(found.shape)
    return found.to(model.device)


def _moments(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """As `TreeOptimiser.state` has them: {section: {"exp_avg/fc.bias": value}}."""
    return {section: dict(trees.leaves(moments)) for section, moments in tree.items()}
