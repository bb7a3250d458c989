"""Use an exported network from its folder alone, with onnxruntime if it is installed and with torch otherwise."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedprior.catalogue.data.images import Scale
from fedprior.core.errors import DataError, ModelError, RunError
from fedprior.core.inputs import ModelInputs
from fedprior.trained.compact import onnx
from fedprior.trained.compact.export_folder import FORMAT, Description, load_module
from fedprior.trained.compact.inputs import Reader


class Prediction(NamedTuple):
    """The most likely class of one input."""

    name: str
    label: int
    probability: float


def describe(folder: Path) -> Description:
    """Read an export's model.json."""
    path = folder / "model.json"
    if not path.is_file():
        raise RunError(
            f"{folder} is not an exported model: it has no model.json. `fedprior export RUN --to DIR` makes one"
        )
    try:
        description: Description = json.loads(path.read_text(encoding="utf-8"))
        if description["format"] != FORMAT:
            raise ValueError(f"its format is {description['format']!r}, not {FORMAT!r}")
        reader(description)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return description


def reader(description: Description, resize: bool = False) -> Reader:
    """A reader that turns files into inputs of this network."""
    shape, scale = tuple(description["input_shape"]), description.get("scale")
    dtype = getattr(torch, description["input_type"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"its input_type is {description['input_type']!r}")
    return Reader(
        shape,
        dtype,
        Scale(tuple(scale["mean"]), tuple(scale["deviation"])) if scale else None,
        resize,
    )


def outputs(folder: Path, inputs: Tensor, batch: int = 256) -> Tensor:
    """The exported network's outputs."""
    if (folder / "model.onnx").exists() and onnx.available():
        session = onnx.session(folder / "model.onnx")
        return torch.cat([torch.from_numpy(onnx.run(session, part.numpy())) for part in inputs.split(batch)])
    return outputs_of(load_module(folder), inputs, batch)


def outputs_of(module: nn.Module, inputs: ModelInputs, batch: int = 256) -> Tensor:
    """A network's outputs for a user's inputs."""
    try:
        with torch.no_grad():
            parts = inputs.split(batch)
            return torch.cat([module(part) if isinstance(part, Tensor) else module(**part.parts) for part in parts])
    except Exception as error:  # for example, a word that the embedding does not know
        raise DataError(f"the network does not run on these inputs ({type(error).__name__}: {error})") from error


def predict(folder: Path | str, paths: Sequence[Path | str], *, resize: bool = False) -> list[Prediction]:
    """Predict the most likely class of every image or array row."""
    folder = Path(folder)
    names, inputs = reader(describe(folder), resize).read([Path(path) for path in paths])
    found = outputs(folder, inputs)
    if found.dim() != 2 or found.shape[1] < 2:
        raise ModelError(
            f"the network's outputs {tuple(found.shape[1:])} are not class scores, so there is nothing to predict; "
            f"run it from Python: `from model import load` in {folder}"
        )
    probabilities, labels = found.softmax(-1).max(-1)
    return [Prediction(*row) for row in zip(names, labels.tolist(), probabilities.tolist(), strict=True)]
