"""Write a network as an ONNX file, and run that file with onnxruntime on one core. Needs the extra `export`."""

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprior.core.errors import ModelError, SettingError

NEEDED = ("onnx", "onnxruntime", "onnxscript")


def available() -> bool:
    """Whether the extra is installed."""
    return all(importlib.util.find_spec(name) for name in NEEDED)


def require() -> None:
    """Raise an error that says how to install the extra if it is missing."""
    if not available():
        raise SettingError("ONNX needs more libraries: pip install 'fedprior[export]'")


def write(module: nn.Module, example: Tensor, path: Path) -> None:
    """Write one file that includes the weights; the batch may have any size."""
    require()
    batch = torch.stack([example, example])
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                (batch,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["input"],
                output_names=["output"],
                verbose=False,
            )
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"torch.onnx cannot export this network ({type(error).__name__}: {reason})") from error
        assert program is not None
        _forget_origin(program.model)
        program.save(path)


def session(path: Path) -> Any:
    """Load the file, ready to run on one core."""
    require()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised, so they need not be printed too
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own types
        raise ModelError(f"{path} cannot be read as ONNX: {str(error).strip().splitlines()[0]}") from error


def run(session: Any, inputs: np.ndarray) -> np.ndarray:
    """The outputs of a batch."""
    try:
        outputs: np.ndarray = session.run(None, {"input": inputs})[0]
    except Exception as error:  # onnxruntime raises its own types
        raise ModelError(f"onnxruntime cannot run this network: {str(error).strip().splitlines()[0]}") from error
    return outputs


def _forget_origin(model: Any) -> None:
    """Drop the exporter's notes on the source line of each operation: they can be larger than the weights."""
    graph = model.graph
    nodes = list(graph.all_nodes())
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values(), *(v for node in nodes for v in node.outputs)]
    for part in (model, graph, *nodes, *values):
        part.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns about its own deprecations and about libraries that are not needed here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
