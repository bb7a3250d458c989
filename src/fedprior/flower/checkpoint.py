"""A deployed server on disk, after every round: tensors in a safetensors file, nothing pickled, replaced atomically."""

import json
import zlib
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fedprior import trees
from fedprior.errors import RunError
from fedprior.flower.server import Server
from fedprior.simulate.checkpoint import write_atomically

FORMAT = "fedprior-flower-checkpoint-1"


def save(path: Path, server: Server, records: str) -> None:
    """Everything that the next round depends on, and a checksum of the records that led here."""
    moments = server.optimiser.state() if server.optimiser else {}
    flat = dict(trees.leaves({"state": server.state, "moments": moments, "clients": {"accuracy": server.accuracy}}))
    # safetensors wants memory of its own for every tensor.
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items() if isinstance(v, Tensor)}
    about = {
        "format": FORMAT,
        "run": server.run,
        "round": str(server.round),
        "seconds": repr(server.seconds),
        "numbers": json.dumps({k: v for k, v in flat.items() if k not in tensors}),
        "accepted": json.dumps(list(server.accepted.items())),
        "records": records,
        "checksum": _checksum(tensors),
    }
    write_atomically(path, safetensors.torch.save(tensors, about))


def load(path: Path, server: Server) -> str:
    """Put a server built from the same config where the checkpoint left it; return the records' checksum."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise RunError(f"{path} is not a checkpoint of a Flower run")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        numbers, accepted = json.loads(about["numbers"]), dict(json.loads(about["accepted"]))
        checksum, records, run = about["checksum"], str(about["records"]), about["run"]
        number, seconds = int(about["round"]), float(about["seconds"])
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error})") from error
    if checksum != _checksum(tensors):
        raise RunError(f"{path} is damaged: its checksum does not match")
    if run != server.run:
        raise RunError(f"{path} belongs to another run than its config.toml says")
    _restore(path, server, tensors, numbers)
    server.accepted, server.round, server.seconds = accepted, number, seconds
    return records


def _restore(path: Path, server: Server, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    def found(name: str, model: Tensor) -> Tensor:
        value = tensors[name]
        if value.shape != model.shape or value.dtype != model.dtype:
            raise ValueError(name)
        return value.to(model.device)

    try:
        # In the server's own order, because sums over parameters depend on it in the last bit.
        state = {
            section: {name: found(f"state/{section}/{name}", leaf) for name, leaf in leaves.items()}
            for section, leaves in server.state.items()
        }
        # What pruning noted in the state comes last, as it did when it was noted.
        for path_, value in tensors.items():
            kind, section, name = [*path_.split("/", 2), "", ""][:3]
            if kind == "state" and section not in server.state:
                state.setdefault(section, {})[name] = value.to(server.root.device)
        accuracy = found("clients/accuracy", server.accuracy)
        if server.optimiser is not None:
            moments: dict[str, dict[str, Any]] = {}
            for name, value in (tensors | numbers).items():
                kind, _, rest = name.partition("/")
                if kind == "moments":
                    section, _, moment = rest.partition("/")
                    moments.setdefault(section, {})[moment] = value
            server.optimiser.load_state(moments)
    except (KeyError, ValueError) as error:
        raise RunError(f"{path} belongs to another model, algorithm or task than its config.toml says") from error
    server.state, server.accuracy = state, accuracy


def _checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of all tensors: safetensors has none of its own."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return str(total)
