"""Find a network's units, and the weights that read them, by tracing it with torch.fx.

A *unit* is a convolution's filter or a linear layer's neuron: its row of the weight, its bias, and the affine pair of
the norm that follows. The output of a layer is a *edge* of channels. Each channel remembers which gated layers feed it
(several after a residual addition), so that the layer at the other end knows which of its columns receive nothing once
those units are closed.
"""

import copy
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from fedprior.core.errors import ModelError, SettingError
from fedprior.core.inputs import ModelInputs
from fedprior.units.components import find_components
from fedprior.units.edges import Edge, Shapes
from fedprior.units.structure import Layer, Reader, Structure
from fedprior.units.torch_operations import CONVOLUTIONS
from fedprior.units.walk import Walk

LINEAR_GATES = ("outputs", "inputs")


def find_structure(
    model: nn.Module,
    example: ModelInputs,
    *,
    gate_output: bool = False,
    ungated: Iterable[str] = (),
    linear_gates: str = "outputs",
) -> Structure:
    """The units of `model`, for inputs shaped like `example` (one input, without the batch dimension).

    The layers that feed the output have no gates unless `gate_output` is set. Frozen layers and those named in
    `ungated` have none either. Linear layers have gates on their outputs or, as in Louizos et al. (2018), their inputs.
    The units of a network with adapters are the components of those.
    """
    if linear_gates not in LINEAR_GATES:
        raise SettingError(f"linear_gates must be {' or '.join(LINEAR_GATES)}, got {linear_gates!r}")
    if components := find_components(model, ungated):
        return components
    by_inputs = linear_gates == "inputs"
    # With gates on inputs, those of the output layer belong to what it reads: its own rows are the classes.
    found = find_edges(model, example, gate_output=gate_output and not by_inputs, ungated=ungated)
    layers = _by_inputs(found, model, gate_output, frozenset(ungated)) if by_inputs else tuple(found.layers.values())
    dense = _recurrent(model)
    if dense and not layers:  # gates are then on what other layers read
        layers = _by_inputs(found, model, True, frozenset(ungated))
        dense += ", so gates are on what other layers read"
    if not layers:
        raise ModelError(
            "the model has no hidden units to gate: every layer feeds the output or is excluded from gating. "
            "Gate the output (gate_output=true), or use weight-wise gates (structured=false)"
        )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    owned = {
        layer.name: layer.parameters
        for layer in found.layers.values()
        if not layer.blocks and all(parameter.rpartition(".")[0] == layer.name for parameter in layer.parameters)
    }
    ends = tuple(sorted(found.inputs)), tuple(sorted(found.outputs))
    return Structure(layers, found.readers, shapes, *ends, owned, dense)


def _recurrent(model: nn.Module) -> str:
    """Text that says which recurrent layers have no gates; empty if there are none."""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.RNNBase)]
    names = ", ".join(f"{name} ({type(part).__name__})" for name, part in parts)
    return f"recurrent layers have no gates, so these are trained and sent in full: {names}" if names else ""


def _by_inputs(found: "Edges", model: nn.Module, gate_output: bool, ungated: frozenset[str]) -> tuple[Layer, ...]:
    """Gate convolutions by their outputs and linear layers by their inputs."""
    excluded = ungated | (frozenset() if gate_output else found.outputs)
    layers = [layer for layer in found.layers.values() if layer.kind == "conv"]
    for name in found.linear:
        if name not in excluded:
            inputs = model.get_parameter(f"{name}.weight").shape[1]
            layers.append(Layer(name, inputs, (f"{name}.weight",), "linear", axis=1))
    return tuple(layers)


class Edges(NamedTuple):
    """What every operation of a traced copy of a network passes on."""

    graph: fx.GraphModule
    """The copy, in evaluation mode."""
    edges: dict[fx.Node, Edge]
    shapes: dict[fx.Node, tuple[int, ...] | None]
    layers: dict[str, Layer]
    readers: tuple[Reader, ...]
    linear: tuple[str, ...]
    """The linear layers with a trainable weight that they do not share."""
    inputs: frozenset[str]
    """The layers that read only the network's input."""
    outputs: frozenset[str]
    """The layers that feed the output."""
    absorbed: dict[str, tuple[str, int, int]]
    """For a layer whose outputs are heads: their name, how many consecutive rows each has, and in how many runs."""

    def origin(self, source: str) -> str:
        """The layer that has the gates of this one."""
        return self.absorbed[source][0] if source in self.absorbed else source


def find_edges(
    model: nn.Module, example: ModelInputs, *, gate_output: bool = False, ungated: Iterable[str] = ()
) -> Edges:
    """Like `find_structure`, but with a result for every operation."""
    graph = _trace(model, example)
    known = {name for name, module in model.named_modules() if isinstance(module, (*CONVOLUTIONS, nn.Linear))}
    own, named = _own_parameters(model, graph), frozenset(ungated)
    every = Walk(graph, own, frozenset(), lenient=True).run()
    for name in sorted(named):
        if name not in known | every.layers.keys():
            raise ModelError(
                f"ungated: {name!r} is not a convolution, linear layer or attention of the model; "
                f"it has {sorted(known | every.layers.keys())}"
            )
    frozen = {name for name in known if any(not p.requires_grad for p in model.get_submodule(name).parameters())}
    # The residual stream of a transformer stays as wide as it is, and so does an embedding that is its head too.
    fixed = named | frozen | every.residual() | _embeddings(model, known)
    # The first walk only asks which layers reach the output, so it may skip what it cannot analyse.
    outputs = Walk(graph, own, fixed, lenient=True).run().output
    excluded = fixed | (frozenset() if gate_output else outputs)
    walk = Walk(graph, own, excluded, lenient=False).run()
    assert isinstance(graph.module, fx.GraphModule)
    linear = tuple(name for name in walk.linear if f"{name}.weight" in own)
    inputs = frozenset(every.layers) - every.fed
    layers = walk.layers, tuple(walk.readers), linear, inputs, outputs, walk.absorbed
    return Edges(graph.module, walk.edges, graph.shapes, *layers)


def _trace(model: nn.Module, example: ModelInputs) -> Shapes:
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model).eval())
    except Exception as error:
        raise ModelError(
            f"the model's forward cannot be traced to find its units ({type(error).__name__}: {error}). Remove control "
            "flow that depends on data, or use weight-wise gates (structured=false), which work for any model"
        ) from error
    shapes = Shapes(graph)
    try:
        with torch.no_grad():
            shapes.run(*_placed(graph, example))
    except Exception as error:
        what = f"of shape {tuple(example.shape)}" if isinstance(example, Tensor) else str(example)
        first = str(error).partition("\n")[0]  # torch adds a trace
        raise ModelError(f"the model does not run on one input {what}: {first}") from error
    return shapes


def _placed(graph: fx.GraphModule, example: ModelInputs) -> list[Tensor]:
    """A batch of one example as the arguments of the forward function, in its order."""
    if isinstance(example, Tensor):
        return [example.unsqueeze(0)]
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    return [example.parts[name].unsqueeze(0) for name in names if name in example.parts]


def _embeddings(model: nn.Module, known: set[str]) -> set[str]:
    """The layers that share a weight with an embedding."""
    embedded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return {name for name in known if id(getattr(model.get_submodule(name), "weight", None)) in embedded}


def _own_parameters(model: nn.Module, graph: Shapes) -> frozenset[str]:
    """The trainable parameters that exactly one module reads, so that a row may be set to zero."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    # A leaf module's parameters do not appear in the graph. One that does is read by the forward function itself.
    read = {str(node.target) for node in graph.module.graph.nodes if node.op == "get_attr"}  # type: ignore[union-attr]
    single = {name for name, p in model.named_parameters() if p.requires_grad and uses[id(p)] == 1}
    return frozenset(single - read)
