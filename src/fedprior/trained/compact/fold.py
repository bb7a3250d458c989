"""Fold batch norms into the layer they follow: with stored statistics they are a scale and a shift per channel."""

import copy
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from fedprior.trained.compact.source import in_layers
from fedprior.units.torch_operations import BATCH_NORMS, CONVOLUTIONS


def fold(module: nn.Module) -> nn.Module:
    """Fold each batch norm that directly follows a layer which nothing else reads. For networks in evaluation mode."""
    if not any(isinstance(part, BATCH_NORMS) for part in module.modules()):
        return module
    root, traced = in_layers(copy.deepcopy(module))
    graph = fx.GraphModule(root, traced)
    uses = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    for node in list(graph.graph.nodes):
        found = _pair(graph, node, uses)
        if found is None:
            continue
        layer, norm = found
        fused = fuse_linear_bn_eval(layer, norm) if isinstance(layer, nn.Linear) else fuse_conv_bn_eval(layer, norm)
        (before,) = node.all_input_nodes
        parent, _, last = str(before.target).rpartition(".")
        setattr(graph.get_submodule(parent), last, fused)
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph.eval()


def _pair(graph: fx.GraphModule, node: fx.Node, uses: list[object]) -> tuple[Any, _BatchNorm] | None:
    """The layer and its norm, if this node is a norm with statistics directly after a layer that only it reads."""
    if node.op != "call_module" or len(node.all_input_nodes) != 1 or uses.count(node.target) > 1:
        return None
    (before,), norm = node.all_input_nodes, graph.get_submodule(str(node.target))
    if before.op != "call_module" or len(before.users) > 1 or uses.count(before.target) > 1:
        return None
    layer = graph.get_submodule(str(before.target))
    if not isinstance(norm, BATCH_NORMS) or norm.running_mean is None:
        return None
    if not isinstance(layer, (*CONVOLUTIONS, nn.Linear)) or "weight" not in layer._parameters:
        return None
    shared = [p for part in graph.modules() for p in part.parameters(recurse=False) if p is layer.weight]
    return (layer, norm) if len(shared) == 1 else None
