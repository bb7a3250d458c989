"""An exported network: model.py and model.safetensors (plain torch), model.onnx, and model.json that describes them."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprior.compact import onnx
from fedprior.compact.measure import REPEATS, fastest, multiply_adds, parameters
from fedprior.compact.shrink import TOLERANCE, compact
from fedprior.compact.source import to_source
from fedprior.errors import ModelError, RunError
from fedprior.storage import to_bytes
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
    """Write the compact network of a module, checked against the module on these inputs; what model.json says.

    `with_onnx`: None writes model.onnx where the libraries for it are installed. `align` is for model.onnx only.
    """
    if with_onnx:
        onnx.require()
    target = folder.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"{folder} exists; choose another folder (--to)")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Nothing is left under the final name unless every check has passed.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        part = Path(temporary)
        if with_onnx is None:
            with_onnx = onnx.available()
        description = {"format": FORMAT, **about, **_write(module.eval(), inputs.cpu(), part, about, with_onnx, align)}
        (part / "model.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        target.mkdir(exist_ok=True)
        for name in ("model.py", "model.safetensors", "model.onnx", "model.json"):  # the last makes it an export
            if (part / name).exists():
                (part / name).replace(target / name)
    return description


def _write(
    module: nn.Module, inputs: Tensor, folder: Path, about: Mapping[str, Any], with_onnx: bool, align: int
) -> Description:
    """The files of the network, checked and measured; what there is to say of them."""
    example, expected = inputs[0], _run(module, inputs)
    batch = inputs.repeat(-(-BATCH // len(inputs)), *[1] * example.dim())[:BATCH]
    small = compact(module, example)
    loaded = _write_torch(small.module, example, folder, about)
    compared = {"torch": _compared(expected, _run(loaded, inputs), "model.py")}
    sizes = {"dense": _size(module, example), "compact": _size(loaded, example)}
    times = fastest([lambda: module(batch), lambda: loaded(batch)])
    sizes["dense"]["milliseconds"], sizes["compact"]["milliseconds"] = times
    notes = [small.note] if small.note else []
    if with_onnx:
        aligned = compact(module, example, align=align).module
        onnx.write(aligned, example, folder / "model.onnx")
        session = onnx.session(folder / "model.onnx")
        compared["onnx"] = _compared(expected, torch.from_numpy(onnx.run(session, inputs.numpy())), "model.onnx")
        sizes |= _onnx_sizes(module, aligned, session, example, batch.numpy(), folder / "model.onnx")
    else:
        notes.append("no model.onnx; it needs pip install 'fedprior[export]'")
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


def _write_torch(small: nn.Module, example: Tensor, folder: Path, about: Mapping[str, Any]) -> nn.Module:
    """model.py and model.safetensors, and the network as they give it."""
    text, weights = to_source(small, example, f"Exported by fedprior {__version__}: {about.get('title', '')}")
    (folder / "model.py").write_text(text, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(to_bytes(weights))
    return load_module(folder)


def load_module(folder: Path) -> nn.Module:
    """The network from an export's model.py, which is run: load only what you trust."""
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
    """How far outputs are from the network's own; more than rounding is an error: nobody may rely on such a file."""
    difference = float((expected - found).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(f"{name} is wrong: its outputs differ from the network's by {difference:.1e}")
    same = int((expected.flatten(1).argmax(1) == found.flatten(1).argmax(1)).sum())
    return {"inputs": len(expected), "same_predictions": same, "largest_difference": difference}


def _size(module: nn.Module, example: Tensor) -> dict[str, float]:
    return {
        "parameters": parameters(module),
        "bytes": len(to_bytes(module.state_dict())),
        "multiply_adds": multiply_adds(module, example),
    }


def _onnx_sizes(
    dense: nn.Module, small: nn.Module, session: Any, example: Tensor, batch: np.ndarray, path: Path
) -> dict[str, dict[str, float]]:
    """Both networks as ONNX; the dense one's file is needed for its numbers only."""
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary) / "dense.onnx"
        onnx.write(dense, example, other)
        dense_session = onnx.session(other)
        times = fastest([lambda: onnx.run(dense_session, batch), lambda: onnx.run(session, batch)])
        found = [(dense, other, times[0]), (small, path, times[1])]
        numbers = [
            {**_size(module, example), "bytes": file.stat().st_size, "milliseconds": time}
            for module, file, time in found
        ]
    return {"dense onnx": numbers[0], "compact onnx": numbers[1]}
