"""Write a forward pass as single torch operations, for networks that cannot be written as calls of layers."""

import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedprior.core.errors import ModelError


def in_operations(module: nn.Module, example: Tensor) -> tuple[nn.Module, fx.Graph]:
    """The same function of the same parameters, as `torch.export` traces it for any batch size, and its graph."""
    batch = torch.stack([example, example])
    dynamic = ({0: torch.export.Dim("batch")},)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own layers warn during export
            program = torch.export.export(module, (batch,), dynamic_shapes=dynamic, strict=False).module()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"torch.export cannot trace this network ({type(error).__name__}: {reason})") from error
    assert isinstance(program, fx.GraphModule)
    graph = program.graph
    graph.set_codegen(fx.graph.CodeGen())  # plain arguments instead of torch.export's trees
    (given,) = (node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(given):
        device = graph.call_function(getattr, (given, "device"))
    for node in list(graph.nodes):
        if node.op == "output":
            node.args = (_single(node.args[0]),)
        elif "device" in node.kwargs:  # new tensors go to the input's device, not to this machine's
            node.update_kwarg("device", device)
        elif not node.users and ("_assert" in str(node.target) or node.op == "call_module"):
            graph.erase_node(node)  # such checks are redundant: the next line would fail anyway
    if not device.users:
        graph.erase_node(device)
    graph.lint()
    return program, graph


def _single(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, (tuple, list)) and len(outputs) == 1 else outputs
