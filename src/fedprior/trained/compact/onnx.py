"""A network as an ONNX file, and that file run by onnxruntime on one core. Needs the extra `export`."""

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
    """Say how to get the extra where it is missing."""
    if not available():
        raise SettingError("ONNX needs more libraries: pip install 'fedprior[export]'")


def write(module: nn.Module, example: Tensor, path: Path) -> None:
    """One file with the weights in it; the batch may have any size."""
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
    """The file, ready to run on one core."""
    require()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised; it need not be printed too
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises types of its own
        raise ModelError(f"{path} cannot be read as ONNX: {str(error).strip().splitlines()[0]}") from error


def run(session: Any, inputs: np.ndarray) -> np.ndarray:
    """The outputs of a batch."""
    try:
        outputs: np.ndarray = session.run(None, {"input": inputs})[0]
    except Exception as error:  # onnxruntime raises types of its own
        raise ModelError(f"onnxruntime cannot run this network: {str(error).strip().splitlines()[0]}") from error
    return outputs


def _forget_origin(model: Any) -> None:
    """Drop the exporter's notes of which line of which file an operation came from: they can outweigh the weights."""
    graph = model.graph
    nodes = list(graph.all_nodes())
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values(), *(v for node in nodes for v in node.outputs)]
    for part in (model, graph, *nodes, *values):
        part.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own deprecations and of libraries that nobody needs here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
