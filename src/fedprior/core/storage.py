"""Store trees of tensors and numbers in safetensors files, which are never pickled and are replaced atomically."""

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
    """The state of a training run between two rounds."""

    run: str
    """Identifies the run: everything that must stay the same when it is resumed."""
    round: int
    seconds: float
    records: str
    """A checksum of the records up to this round."""
    tree: dict[str, Any]
    """Everything that the next round depends on. Optimisers mix plain numbers with their tensors."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further entries in the file's header."""


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


def load(path: Path, kind: str, run: str | None) -> Saved:
    """Read a checkpoint of this kind and run (none: of any run), or raise an error that says why it cannot be used."""
    with reading(path):
        with safetensors.safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.pop("format", "") != kind:
                raise RunError(f"{path} is not a fedprior checkpoint of kind {kind}")
            tensors: Params = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.pop("checksum") != _checksum(tensors):
            raise RunError(f"{path} is damaged: its checksum does not match")
        tree = _nested(tensors | json.loads(about.pop("numbers")))
        number, seconds = int(about.pop("round")), float(about.pop("seconds"))
        found = Saved(about.pop("run"), number, seconds, about.pop("records"), tree, about)
    if run not in (None, found.run):
        raise RunError(f"{path} does not belong to the run in its config.toml, but to {found.run}")
    return found


def entry(path: Path, name: str) -> Tensor | None:
    """One of a checkpoint's tensors, if it has it, without the others."""
    with reading(path), safetensors.safe_open(str(path), framework="pt") as file:
        return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Treat any failure in this block as a sign that the file is damaged."""
    try:
        yield
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise RunError(f"{path} is damaged and cannot be read ({error})") from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Treat any failure in this block as a sign that the file, though readable, belongs to something else."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} does not match the model, algorithm or task in its config.toml") from error


def like(model: Any, found: Any, device: torch.device | str = "cpu") -> Any:
    """Move `found` to the device of `model` and put it in the same order, which affects the last bit of sums.

    Entries that only `found` has come last and go to `device`: pruning adds sections to a server.
    """
    if isinstance(model, dict):
        added = {name: child for name, child in found.items() if name not in model}
        known = {name: like(child, found[name], device) for name, child in model.items()}
        return known | trees.tree_map(lambda leaf: leaf.to(device), added)
    if found.shape != model.shape or found.dtype != model.dtype:
        raise ValueError(found.shape)
    return found.to(model.device)


def moments(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """An optimiser's moments in the form of `TreeOptimiser.state`: {section: {"exp_avg/fc.bias": value}}."""
    return {section: dict(trees.leaves(of_section)) for section, of_section in tree.items()}


def owned(tensors: Mapping[str, Tensor]) -> Params:
    """Copy tensors to the host: safetensors needs separate memory for every tensor."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Write tensors, and nothing else, as the bytes of a safetensors file."""
    return safetensors.torch.save(owned(tensors))


def from_bytes(data: bytes) -> dict[str, Any]:
    """Rebuild the tree whose leaves such a file holds."""
    return _nested(safetensors.torch.load(data))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `trees.leaves`. No name contains a slash: `check_trainable` makes sure of that."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return tree


def _checksum(tensors: Params) -> str:
    """The CRC-32 of all tensors, because safetensors has no checksum."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), total))
    return str(total)
