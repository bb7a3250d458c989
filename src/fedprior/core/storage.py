"""Trees of tensors and numbers on disk: safetensors files, nothing pickled, replaced atomically."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedprior.core import trees
from fedprior.core.errors import RunError
from fedprior.core.files import write_atomically
from fedprior.core.trees import Params


@dataclass(frozen=True)
class Saved:
    """A training between two rounds."""

    run: str
    """What must not change between two sessions of a run."""
    round: int
    seconds: float
    records: str
    """A checksum of the records that led here."""
    tree: dict[str, Any]
    """Everything that the next round depends on. Optimisers keep plain numbers among their tensors."""
    more: Mapping[str, str] = field(default_factory=dict)
    """What else the head of the file says."""


def save(path: Path, kind: str, saved: Saved) -> None:
    """Write a checkpoint of this kind."""
    flat = dict(trees.leaves(saved.tree))
    tensors = owned({name: value for name, value in flat.items() if isinstance(value, Tensor)})
    about = {
        **saved.more,
        "format": kind,
        "run": saved.run,
        "round": str(saved.round),
        "seconds": repr(saved.seconds),
        "numbers": json.dumps({name: value for name, value in flat.items() if name not in tensors}),
        "checksum": _checksum(tensors),
        "records": saved.records,
    }
    write_atomically(path, safetensors.torch.save(tensors, about))


def load(path: Path, kind: str, run: str) -> Saved:
    """A checkpoint of this kind and run, or why there is none."""
    with reading(path):
        with safetensors.safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.pop("format", "") != kind:
                raise RunError(f"{path} is not a fedprior checkpoint of the kind {kind}")
            tensors: Params = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.pop("checksum") != _checksum(tensors):
            raise RunError(f"{path} is damaged: its checksum does not match")
        tree = _nested(tensors | json.loads(about.pop("numbers")))
        number, seconds = int(about.pop("round")), float(about.pop("seconds"))
        found = Saved(about.pop("run"), number, seconds, about.pop("records"), tree, about)
    if found.run != run:
        raise RunError(f"{path} belongs to another run than its config.toml says ({found.run})")
    return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong in here is the file's fault."""
    try:
        yield
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error})") from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """What goes wrong in here is that the file, which can be read, is of something else."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} belongs to another model, algorithm or task than its config.toml says") from error


def like(model: Any, found: Any, device: torch.device | str = "cpu") -> Any:
    """`found` where `model` is, and in its order: sums over parameters depend on that in the last bit.

    What only `found` has comes last, and to `device`: pruning adds sections to a server.
    """
    if isinstance(model, dict):
        added = {name: child for name, child in found.items() if name not in model}
        known = {name: like(child, found[name], device) for name, child in model.items()}
        return known | trees.tree_map(lambda leaf: leaf.to(device), added)
    if found.shape != model.shape or found.dtype != model.dtype:
        raise ValueError(found.shape)
    return found.to(model.device)


def moments(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """An optimiser's, as `TreeOptimiser.state` has them: {section: {"exp_avg/fc.bias": value}}."""
    return {section: dict(trees.leaves(of_section)) for section, of_section in tree.items()}


def owned(tensors: Mapping[str, Tensor]) -> Params:
    """Copies on the host: safetensors wants memory of its own for every tensor."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of nothing but tensors."""
    return safetensors.torch.save(owned(tensors))


def from_bytes(data: bytes) -> dict[str, Any]:
    """The tree whose leaves were in such a file."""
    return _nested(safetensors.torch.load(data))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `trees.leaves`: no name in a tree holds a slash, which `check_trainable` makes sure of."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return tree


def _checksum(tensors: Params) -> str:
    """CRC-32 of all tensors: safetensors has none of its own."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return str(total)
