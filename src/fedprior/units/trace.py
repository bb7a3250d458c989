"""Find a network's units, and who reads them, by tracing it with torch.fx.

A *unit* is a convolution's filter or a linear layer's neuron: its row of the weight, its bias, and the affine pair of
the norm that follows. The output of a layer is a *wire* of channels. Each channel remembers which gated layers feed it
(several after a residual addition) so that the layer at the other end knows which of its columns nobody feeds once
those units are closed.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fedprior.errors import ModelError, SettingError
from fedprior.units.operations import (
    CONVOLUTIONS,
    FLATTENS,
    NORMS,
    ZERO_PRESERVING_MODULES,
    ZERO_PRESERVING_NAMES,
    keeps_zero,
    name_of,
    pooled,
)
from fedprior.units.structure import Layer, Reader, Structure


@dataclass(frozen=True)
class Wire:
    """A tensor's channels. No sources: at least one ungated contribution, so no channel ever falls silent."""

    sources: frozenset[str] = frozenset()
    axis: int = 1
    repeat: int = 1


_OPEN = Wire()


class _Shapes(fx.Interpreter):
    """Runs the graph once and keeps the shape of every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.shapes: dict[fx.Node, tuple[int, ...] | None] = {}
        self.containers: set[fx.Node] = set()
        """Values that are not a tensor but hold some: what `chunk` or a recurrent layer returns."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n] = tuple(value.shape) if isinstance(value, Tensor) else None
        if isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
            self.containers.add(n)
        return value


LINEAR_GATES = ("outputs", "inputs")


def find_structure(
    model: nn.Module,
    example: Tensor,
    *,
    gate_output: bool = False,
    ungated: Iterable[str] = (),
    linear_gates: str = "outputs",
) -> Structure:
    """The units of `model`, for inputs shaped like `example` (one input, without the batch dimension).

    The layers that feed the output are not gated unless `gate_output`; neither are those named in `ungated`, nor those
    that are frozen. Linear layers have gates on their outputs or, as in Louizos et al. (2018), on their inputs.
    """
    if linear_gates not in LINEAR_GATES:
        raise SettingError(f"linear_gates must be {' or '.join(LINEAR_GATES)}, got {linear_gates!r}")
    by_inputs = linear_gates == "inputs"
    # By their inputs, the output layer's gates belong to what it reads: its own rows are the classes.
    found = find_wires(model, example, gate_output=gate_output and not by_inputs, ungated=ungated)
    layers = _by_inputs(found, model, gate_output, frozenset(ungated)) if by_inputs else tuple(found.layers.values())
    if not layers:
        raise ModelError(
            "the model has no hidden units to gate: every layer feeds the output or is left without gates. "
            "Gate the output (gate_output=true), or use weight-wise gates (structured=false)"
        )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    owned = {
        layer.name: layer.parameters
        for layer in found.layers.values()
        if all(parameter.rpartition(".")[0] == layer.name for parameter in layer.parameters)
    }
    return Structure(layers, found.readers, shapes, tuple(sorted(found.outputs)), owned)


def _by_inputs(found: "Wires", model: nn.Module, gate_output: bool, ungated: frozenset[str]) -> tuple[Layer, ...]:
    """The convolutions by their outputs, the linear layers by their inputs."""
    excluded = ungated | (frozenset() if gate_output else found.outputs)
    layers = [layer for layer in found.layers.values() if layer.kind == "conv"]
    for name in found.linear:
        if name not in excluded:
            inputs = model.get_parameter(f"{name}.weight").shape[1]
            layers.append(Layer(name, inputs, (f"{name}.weight",), "linear", axis=1))
    return tuple(layers)


class Wires(NamedTuple):
    """What every operation of a traced copy of a network passes on."""

    graph: fx.GraphModule
    """The copy, in evaluation mode."""
    wires: dict[fx.Node, Wire]
    shapes: dict[fx.Node, tuple[int, ...] | None]
    layers: dict[str, Layer]
    readers: tuple[Reader, ...]
    linear: tuple[str, ...]
    """The linear layers with a trainable weight of their own."""
    outputs: frozenset[str]
    """The layers that feed the output."""


def find_wires(model: nn.Module, example: Tensor, *, gate_output: bool = False, ungated: Iterable[str] = ()) -> Wires:
    """The same as `find_structure`, operation by operation."""
    graph = _trace(model, example)
    known = {name for name, module in model.named_modules() if isinstance(module, (*CONVOLUTIONS, nn.Linear))}
    named = frozenset(ungated)
    for name in sorted(named):
        if name not in known:
            raise ModelError(
                f"ungated: {name!r} is not a convolution or linear layer of the model; it has {sorted(known)}"
            )
    own = _own_parameters(model, graph)
    frozen = {name for name in known if any(not p.requires_grad for p in model.get_submodule(name).parameters())}
    fixed = named | frozen
    # The first walk asks only which layers reach the output; what it cannot read is none of its business.
    outputs = _Walk(graph, own, fixed, lenient=True).run().output
    excluded = fixed | (frozenset() if gate_output else outputs)
    walk = _Walk(graph, own, excluded, lenient=False).run()
    assert isinstance(graph.module, fx.GraphModule)
    linear = tuple(name for name in walk.linear if f"{name}.weight" in own)
    return Wires(graph.module, walk.wires, graph.shapes, walk.layers, tuple(walk.readers), linear, outputs)


def _trace(model: nn.Module, example: Tensor) -> _Shapes:
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model).eval())
    except Exception as error:
        raise ModelError(
            f"the model's forward cannot be traced to find its units ({type(error).__name__}: {error}). Remove control "
            "flow that depends on data, or use weight-wise gates (structured=false), which work for any model"
        ) from error
    shapes = _Shapes(graph)
    try:
        with torch.no_grad():
            shapes.run(example.unsqueeze(0))
    except Exception as error:
        raise ModelError(f"the model does not run on one input of shape {tuple(example.shape)}: {error}") from error
    return shapes


def _own_parameters(model: nn.Module, graph: _Shapes) -> frozenset[str]:
    """The trainable parameters that one module reads and nothing else does, so that a row may be set to zero."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    # A leaf module's parameters do not appear in the graph; one that does is read by the forward function itself.
    read = {str(node.target) for node in graph.module.graph.nodes if node.op == "get_attr"}  # type: ignore[union-attr]
    single = {name for name, p in model.named_parameters() if p.requires_grad and uses[id(p)] == 1}
    return frozenset(single - read)


class _Walk:
    """One pass over the traced graph, operation by operation."""

    def __init__(self, graph: _Shapes, own: frozenset[str], excluded: frozenset[str], *, lenient: bool) -> None:
        self.graph = graph
        self.own = own
        self.modules = dict(graph.module.named_modules())
        self.excluded = excluded
        self.lenient = lenient
        self.wires: dict[fx.Node, Wire] = {}
        self.layers: dict[str, Layer] = {}
        self.readers: list[Reader] = []
        self.output: frozenset[str] = frozenset()
        self.seen: set[str] = set()
        self.linear: list[str] = []

    def run(self) -> "_Walk":
        for node in self.graph.module.graph.nodes:  # type: ignore[union-attr]  # an Interpreter's module is a GraphModule
            inputs = [self.wires[n] for n in node.all_input_nodes]
            gated = [wire for wire in inputs if wire.sources]
            if node.op == "output":
                self.output = frozenset().union(*(wire.sources for wire in inputs))
            elif node.op == "call_module" and gated and len(inputs) > 1:
                self.wires[node] = self._unknown(f"module {str(node.target)!r}, which has several inputs,", inputs)
            elif node.op == "call_module":
                self.wires[node] = self._module(node, inputs[0] if inputs else _OPEN)
            elif not gated:
                self.wires[node] = _OPEN
            elif node in self.graph.containers:
                self.wires[node] = self._unknown(f"operation {node.name!r}, which returns several tensors,", inputs)
            elif self.graph.shapes[node] is None:
                self.wires[node] = _OPEN
            else:
                self.wires[node] = self._function(node, inputs)
        return self

    def _module(self, node: fx.Node, wire: Wire) -> Wire:
        name, module = str(node.target), self.modules[str(node.target)]
        if any(True for _ in module.parameters()):
            if name in self.seen and not self.lenient:
                raise ModelError(
                    f"module {name!r} is used twice in the forward pass; give each use a module of its own"
                )
            self.seen.add(name)
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            return self._layer(node, name, module, wire)
        if not wire.sources:
            return _OPEN
        if isinstance(module, NORMS):
            return self._norm(node, name, module, wire)
        what = f"module {name!r} ({type(module).__name__})"
        if node in self.graph.containers or (isinstance(module, nn.Hardtanh) and not keeps_zero(module)):
            return self._unknown(what, [wire])
        if isinstance(module, ZERO_PRESERVING_MODULES):
            return self._moved(node, wire, what, pooled(type(module).__name__))
        if isinstance(module, nn.Flatten):
            return self._flatten(node, wire)
        return self._unknown(what, [wire])

    def _layer(self, node: fx.Node, name: str, module: nn.Module, wire: Wire) -> Wire:
        what = f"module {name!r} ({type(module).__name__})"
        assert isinstance(module.weight, Tensor)
        kind = "linear" if isinstance(module, nn.Linear) else "conv"
        rank = len(self._shape(node))
        axis = rank - 1 if kind == "linear" else 1
        self.linear += [name] if kind == "linear" else []
        if wire.sources:
            if isinstance(module, CONVOLUTIONS) and module.groups != 1:
                self._unknown(f"{what}, a grouped convolution,", [wire])
            if wire.axis != axis:
                self._unknown(f"{what}, which reads another dimension than the channels,", [wire])
            if f"{name}.weight" in self.own:
                self.readers.append(Reader(f"{name}.weight", tuple(sorted(wire.sources)), wire.repeat))
        if name in self.excluded:
            return _OPEN
        owned = [f"{name}.weight"] + ([f"{name}.bias"] if module.bias is not None else [])
        for parameter in owned:
            if parameter not in self.own and not self.lenient:
                raise ModelError(
                    f"{what} shares {parameter!r} with other code or computes it from other parameters; "
                    f"give it a parameter of its own, or leave it without gates (ungated={name})"
                )
        self.layers[name] = Layer(name, module.weight.shape[0], tuple(owned), kind)
        return Wire(frozenset([name]), axis)

    def _norm(self, node: fx.Node, name: str, module: nn.Module, wire: Wire) -> Wire:
        what = f"module {name!r} ({type(module).__name__})"
        if len(wire.sources) != 1 or wire.repeat != 1:
            return self._unknown(f"{what}, which normalises several layers' outputs at once,", [wire])
        affine = [f"{name}.{part}" for part in ("weight", "bias") if getattr(module, part, None) is not None]
        if not affine and (not isinstance(module, NORMS[2:]) or module.track_running_stats):
            # Without its affine pair a norm shifts a silent channel by the mean of the others, or by a running mean.
            return self._unknown(f"{what} without affine parameters", [wire])
        if any(parameter not in self.own for parameter in affine):
            return self._unknown(f"{what}, whose parameters are frozen or shared,", [wire])
        rank = len(self._shape(node))
        first = rank - len(module.normalized_shape) if isinstance(module, nn.LayerNorm) else 1
        if wire.axis != first:
            return self._unknown(f"{what}, which normalises another dimension than the channels,", [wire])
        (source,) = wire.sources
        layer = self.layers[source]
        if any(getattr(module, part.rsplit(".", 1)[1]).shape[0] != layer.size for part in affine):
            return self._unknown(f"{what}, which does not have one scale a channel,", [wire])
        self.layers[source] = replace(layer, parameters=(*layer.parameters, *affine))
        return wire

    def _function(self, node: fx.Node, inputs: list[Wire]) -> Wire:
        name = str(node.target) if node.op == "call_method" else name_of(node.target)
        tensors = self._tensors(node)
        if name in ("add", "iadd", "add_") and len(tensors) == 2:
            return self._add(node, tensors)
        if len(tensors) == 1:
            wire, what = self.wires[tensors[0]], f"operation {name!r} at node {node.name!r}"
            divides = name in ("truediv", "div") and node.args[:1] == (tensors[0],)
            if divides or name in ("mul", "imul", "mul_") or (name in ZERO_PRESERVING_NAMES and keeps_zero(node)):
                return self._moved(node, wire, what, pooled(name))
            if name in FLATTENS:
                return self._flatten(node, wire)
            if name == "mean":
                return self._mean(node, wire)
        return self._unknown(f"operation {name!r} at node {node.name!r}", inputs)

    def _add(self, node: fx.Node, tensors: list[fx.Node]) -> Wire:
        a, b = (self.wires[n] for n in tensors)
        ranks = {len(self._shape(n)) for n in tensors}
        if self.lenient:
            return Wire(a.sources | b.sources)
        if not a.sources or not b.sources:
            return _OPEN
        if (a.axis, a.repeat) != (b.axis, b.repeat) or len(ranks) > 1:
            return self._unknown(f"addition {node.name!r} of differently laid out channels", [a, b])
        return replace(a, sources=a.sources | b.sources)

    def _moved(self, node: fx.Node, wire: Wire, what: str, pooled: int) -> Wire:
        """The channels stay where they are, unless the last `pooled` dimensions are pooled and they are among them."""
        if wire.axis < len(self._shape(node)) - pooled:
            return wire
        return self._unknown(f"{what}, which mixes the channels,", [wire])

    def _mean(self, node: fx.Node, wire: Wire) -> Wire:
        """A mean over other dimensions than the channels'; those before it may vanish."""
        before, after = self._shape(self._tensors(node)[0]), self._shape(node)
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
        dims = given if isinstance(given, (tuple, list)) else [given]
        reduced = {dim % len(before) for dim in dims if isinstance(dim, int)}
        if dims and len(reduced) == len(dims) and wire.axis not in reduced:
            gone = sum(dim < wire.axis for dim in reduced) if len(after) < len(before) else 0
            return replace(wire, axis=wire.axis - gone)
        return self._unknown(f"mean {node.name!r} over the channels", [wire])

    def _flatten(self, node: fx.Node, wire: Wire) -> Wire:
        before, after = self._shape(self._tensors(node)[0]), self._shape(node)
        if before == after:
            return wire
        if wire.axis == 1 and len(after) == 2 and after == (before[0], math.prod(before[1:])):
            return replace(wire, repeat=wire.repeat * math.prod(before[2:]))
        return self._unknown(f"reshape {node.name!r} from {before} to {after}", [wire])

    def _tensors(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self.graph.shapes[n] is not None]

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = self.graph.shapes[node]
        assert shape is not None
        return shape

    def _unknown(self, what: str, wires: list[Wire]) -> Wire:
        sources = frozenset().union(*(wire.sources for wire in wires))
        if self.lenient:
            return Wire(sources)
        names = ",".join(sorted(sources))
        raise ModelError(
            f"{what} cannot be analysed: fedprior does not know what it does to a closed unit of {names}. "
            f"Leave those layers without gates (ungated={names}), or use weight-wise gates (structured=false)"
        )
