"""Export a network: model.py and model.safetensors (plain torch), model.onnx, and model.json to describe them."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedprior.core.adapters import merged
from fedprior.core.errors import ModelError, RunError
from fedprior.core.files import writing
from fedprior.core.storage import to_bytes
from fedprior.trained.compact import onnx
from fedprior.trained.compact.lower import in_operations
from fedprior.trained.compact.measure import REPEATS, fastest, multiply_adds, parameters, stored
from fedprior.trained.compact.shrink import TOLERANCE, compact
from fedprior.trained.compact.source import in_layers, to_source
from fedprior.version import __version__

FORMAT = "fedprior-export-1"
BATCH = 64
Description = dict[str, Any]


def export_module(
    module: nn.Module,
    inputs: Tensor,
    folder: Path,
    *,
    about: Mapping[str, Any],
    with_onnx: bool | None = None,
    align: int = 8,
) -> Description:
    """Write the compact network of a module, checked against it on these inputs; return the content of model.json.

    If `with_onnx` is None, model.onnx is written if possible. `align` applies only to model.onnx.
    """
    if with_onnx:
        onnx.require()
    target = folder.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"{folder} exists; choose another folder (--to)")
    with writing(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
    # Nothing gets its final name unless every check has passed.
    with writing(folder), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        part = Path(temporary)
        description = {"format": FORMAT, **about, **_write(module.eval(), inputs.cpu(), part, about, with_onnx, align)}
        (part / "model.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        target.mkdir(exist_ok=True)
        for name in ("model.py", "model.safetensors", "model.onnx", "model.json"):  # the last one makes it an export
            if (part / name).exists():
                (part / name).replace(target / name)
    return description


def _write(
    module: nn.Module, inputs: Tensor, folder: Path, about: Mapping[str, Any], with_onnx: bool | None, align: int
) -> Description:
    """Write the network's files, check and measure them; return their description."""
    example, expected, module = inputs[0], _run(module, inputs), merged(module)
    batch = inputs.repeat(-(-BATCH // len(inputs)), *[1] * example.dim())[:BATCH]
    small = compact(module, example)
    loaded, exact, note = _write_torch(small.module, inputs, expected, folder, about)
    compared = {"torch": exact}
    sizes = {"dense": _size(module, example), "compact": _size(loaded, example)}
    times = fastest([lambda: module(batch), lambda: loaded(batch)])
    sizes["dense"]["milliseconds"], sizes["compact"]["milliseconds"] = times
    notes = [text for text in (small.note, note) if text]
    if with_onnx is None and not onnx.available():
        notes.append("no model.onnx; it needs pip install 'fedprior[export]'")
    elif with_onnx is not False:
        try:
            found, measured = _write_onnx(module, inputs, expected, folder / "model.onnx", align)
            compared["onnx"], sizes = found, sizes | measured
        except ModelError as error:
            if with_onnx:
                raise
            (folder / "model.onnx").unlink(missing_ok=True)
            notes.append(f"no model.onnx: {error}")
    return {
        "input_shape": list(example.shape),
        "input_type": str(example.dtype).removeprefix("torch."),
        "units": {name: list(count) for name, count in small.units.items()},
        "compared": compared,
        "sizes": sizes,
        "timing": f"time of one core for a batch of {BATCH}, the fastest of up to {REPEATS}",
        "notes": notes,
        "made": {"fedprior": __version__, "torch": str(torch.__version__)},
    }


def _write_torch(
    small: nn.Module, inputs: Tensor, expected: Tensor, folder: Path, about: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, float], str]:
    """Write model.py and model.safetensors; return the network as loaded from them, its accuracy, and a note."""
    title, example = f"Exported by fedprior {__version__}: {about.get('title', '')}", inputs[0]

    def written(module: nn.Module, graph: fx.Graph) -> tuple[nn.Module, dict[str, float]]:
        text, weights = to_source(module, graph, example, title)
        (folder / "model.py").write_text(text, encoding="utf-8")
        (folder / "model.safetensors").write_bytes(to_bytes(weights))
        loaded = load_module(folder)
        return loaded, _compared(expected, _run(loaded, inputs), "model.py")

    try:
        return *written(*in_layers(small)), ""
    except ModelError as error:
        # Layers are easier to read, but not every network can be written in layers.
        try:
            return *written(*in_operations(small, example)), f"model.py has single operations, not layers: {error}"
        except ModelError as other:
            raise ModelError(f"{error}; nor as single operations: {other}") from error


def load_module(folder: Path) -> nn.Module:
    """Load the network from an export's model.py. This runs the file: load only what you trust."""
    path = folder / "model.py"
    names: dict[str, Any] = {"__name__": "model", "__file__": str(path)}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
        model: nn.Module = names["load"](folder)
    except Exception as error:
        raise ModelError(f"{path} cannot be loaded ({type(error).__name__}: {error})") from error
    return model


def _run(module: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        parts = [module(part) for part in inputs.split(256)]
    if not isinstance(parts[0], Tensor):
        raise ModelError("only networks with one output tensor can be exported")
    return torch.cat(parts)


def _compared(expected: Tensor, found: Tensor, name: str) -> dict[str, float]:
    """How far outputs are from the network's own. More than rounding is an error: such a file must not be used."""
    difference = float((expected - found).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(f"{name} is wrong: its outputs differ from the network's by {difference:.1e}")
    same = int((expected.flatten(1).argmax(1) == found.flatten(1).argmax(1)).sum())
    return {"inputs": len(expected), "same_predictions": same, "largest_difference": difference}


def _size(module: nn.Module, example: Tensor) -> dict[str, float]:
    return {
        "parameters": parameters(module),
        "bytes": len(to_bytes(stored(module))),
        "multiply_adds": multiply_adds(module, example),
    }


def _write_onnx(
    module: nn.Module, inputs: Tensor, expected: Tensor, path: Path, align: int
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Write model.onnx; return how exact it is, and its sizes and times next to the dense network's."""
    example = inputs[0]
    batch = inputs.repeat(-(-BATCH // len(inputs)), *[1] * example.dim())[:BATCH].numpy()
    small = compact(module, example, align=align).module
    onnx.write(small, example, path)
    session = onnx.session(path)
    compared = _compared(expected, torch.from_numpy(onnx.run(session, inputs.numpy())), "model.onnx")
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary) / "dense.onnx" if parameters(small) < parameters(module) else path
        if other != path:
            onnx.write(module, example, other)
        dense_session = onnx.session(other)
        times = fastest([lambda: onnx.run(dense_session, batch), lambda: onnx.run(session, batch)])
        found = [(module, other, times[0]), (small, path, times[1])]
        numbers = [
            {**_size(module, example), "bytes": file.stat().st_size, "milliseconds": time}
            for module, file, time in found
        ]
    return compared, {"dense onnx": numbers[0], "compact onnx": numbers[1]}
