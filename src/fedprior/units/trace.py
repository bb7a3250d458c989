"""Find a network's units, and who reads them, by tracing it with torch.fx.

A *unit* is a convolution's filter or a linear layer's neuron: its row of the weight, its bias, and the affine pair of
the norm that follows. The output of a layer is a *wire* of channels. Each channel remembers which gated layers feed it
(several after a residual addition) so that the layer at the other end knows which of its columns nobody feeds once
those units are closed.
"""

import copy
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedprior.errors import ModelError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Operations that map a channel of zeros to a channel of zeros, and leave the channels where they are.
ZERO_PRESERVING_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Hardswish, nn.Hardtanh, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_ZERO_PRESERVING_NAMES = (
    *("relu", "relu_", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh"),
    *("hardswish", "hardtanh", "softsign", "dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
)
_FLATTENS = ("flatten", "view", "reshape")


@dataclass(frozen=True)
class Layer:
    """A gated layer: unit j owns row j of each of `parameters`."""

    name: str
    size: int
    parameters: tuple[str, ...]
    kind: str
    """`conv` or `linear`."""


@dataclass(frozen=True)
class Reader:
    """A weight whose columns read a wire: channel j feeds `repeat` columns, and is silent when all `sources` are."""

    parameter: str
    sources: tuple[str, ...]
    repeat: int


@dataclass(frozen=True)
class Structure:
    """What tracing found: the gated layers, and the weights that read them."""

    layers: tuple[Layer, ...]
    readers: tuple[Reader, ...]
    shapes: dict[str, tuple[int, ...]]
    output_layers: tuple[str, ...]


@dataclass(frozen=True)
class _Wire:
    """A tensor's channels. No sources: at least one ungated contribution, so no channel ever falls silent."""

    sources: frozenset[str] = frozenset()
    axis: int = 1
    repeat: int = 1


_OPEN = _Wire()


class _Shapes(fx.Interpreter):
    """Runs the graph once and keeps the shape of every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.shapes: dict[fx.Node, tuple[int, ...] | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n] = tuple(value.shape) if isinstance(value, Tensor) else None
        return value


def find_structure(
    model: nn.Module, example: Tensor, *, gate_output: bool = False, ungated: Iterable[str] = ()
) -> Structure:
    """The units of `model`, for inputs shaped like `example` (one input, without the batch dimension).

    The layers that feed the output are not gated unless `gate_output`; neither are those named in `ungated`.
    """
    graph = _trace(model, example)
    known = {name for name, module in model.named_modules() if isinstance(module, (*CONVOLUTIONS, nn.Linear))}
    for name in ungated:
        if name not in known:
            raise ModelError(
                f"ungated: {name!r} is not a convolution or linear layer of the model; it has {sorted(known)}"
            )
    # The first walk asks only which layers reach the output; what it cannot read is none of its business.
    outputs = _Walk(graph, frozenset(ungated), lenient=True).run().output
    excluded = frozenset(ungated) | (frozenset() if gate_output else outputs)
    walk = _Walk(graph, excluded, lenient=False).run()
    if not walk.layers:
        raise ModelError(
            "the model has no hidden units to gate: its only layers feed the output. "
            "Use weight-wise gates (fedsparse-unstructured), or gate_output=true"
        )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Structure(tuple(walk.layers.values()), tuple(walk.readers), shapes, tuple(sorted(outputs)))


def _trace(model: nn.Module, example: Tensor) -> _Shapes:
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model).eval())
    except Exception as error:
        raise ModelError(
            f"the model's forward cannot be traced to find its units ({type(error).__name__}: {error}). Remove control "
            "flow that depends on data, or use weight-wise gates (fedsparse-unstructured), which work for any model"
        ) from error
    shapes = _Shapes(graph)
    try:
        with torch.no_grad():
            shapes.run(example.unsqueeze(0))
    except Exception as error:
        raise ModelError(f"the model does not run on one input of shape {tuple(example.shape)}: {error}") from error
    return shapes


class _Walk:
    """One pass over the traced graph, operation by operation."""

    def __init__(self, graph: _Shapes, excluded: frozenset[str], *, lenient: bool) -> None:
        self.graph = graph
        self.modules = dict(graph.module.named_modules())
        self.excluded = excluded
        self.lenient = lenient
        self.wires: dict[fx.Node, _Wire] = {}
        self.layers: dict[str, Layer] = {}
        self.readers: list[Reader] = []
        self.output: frozenset[str] = frozenset()
        self.seen: set[str] = set()

    def run(self) -> "_Walk":
        for node in self.graph.module.graph.nodes:  # type: ignore[union-attr]  # an Interpreter's module is a GraphModule
            inputs = [self.wires[n] for n in node.all_input_nodes]
            gated = [wire for wire in inputs if wire.sources]
            if node.op == "output":
                self.output = frozenset().union(*(wire.sources for wire in inputs))
            elif node.op == "call_module":
                self.wires[node] = self._module(node, inputs[0] if inputs else _OPEN)
            elif not gated or self.graph.shapes[node] is None:
                self.wires[node] = _OPEN
            else:
                self.wires[node] = self._function(node, inputs)
        return self

    def _module(self, node: fx.Node, wire: _Wire) -> _Wire:
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
        if isinstance(module, ZERO_PRESERVING_MODULES):
            return self._moved(node, wire)
        if isinstance(module, nn.Flatten):
            return self._flatten(node, wire)
        return self._unknown(f"module {name!r} ({type(module).__name__})", [wire])

    def _layer(self, node: fx.Node, name: str, module: nn.Module, wire: _Wire) -> _Wire:
        what = f"module {name!r} ({type(module).__name__})"
        assert isinstance(module.weight, Tensor)
        kind = "linear" if isinstance(module, nn.Linear) else "conv"
        rank = len(self._shape(node))
        axis = rank - 1 if kind == "linear" else 1
        if isinstance(module, CONVOLUTIONS) and module.groups != 1 and wire.sources:
            return self._unknown(f"{what}, a grouped convolution,", [wire])
        if wire.sources:
            if wire.axis != axis:
                return self._unknown(f"{what}, which reads another dimension than the channels,", [wire])
            self.readers.append(Reader(f"{name}.weight", tuple(sorted(wire.sources)), wire.repeat))
        if name in self.excluded:
            return _OPEN
        owned = [f"{name}.weight"] + ([f"{name}.bias"] if module.bias is not None else [])
        self.layers[name] = Layer(name, module.weight.shape[0], tuple(owned), kind)
        return _Wire(frozenset([name]), axis)

    def _norm(self, node: fx.Node, name: str, module: nn.Module, wire: _Wire) -> _Wire:
        what = f"module {name!r} ({type(module).__name__})"
        if len(wire.sources) != 1 or wire.repeat != 1:
            return self._unknown(f"{what}, which normalises several layers' outputs at once,", [wire])
        affine = [f"{name}.{part}" for part in ("weight", "bias") if getattr(module, part, None) is not None]
        if not affine and not isinstance(module, NORMS[2:]):
            # Without its affine pair a norm shifts a silent channel by the mean of the others.
            return self._unknown(f"{what} without affine parameters", [wire])
        (source,) = wire.sources
        layer = self.layers[source]
        if any(getattr(module, part.rsplit(".", 1)[1]).shape[0] != layer.size for part in affine):
            return self._unknown(f"{what}, which does not have one scale a channel,", [wire])
        self.layers[source] = replace(layer, parameters=(*layer.parameters, *affine))
        return wire

    def _function(self, node: fx.Node, inputs: list[_Wire]) -> _Wire:
        name = str(node.target) if node.op == "call_method" else _name_of(node.target)
        tensors = [
            wire for n, wire in zip(node.all_input_nodes, inputs, strict=True) if self.graph.shapes[n] is not None
        ]
        if name in ("add", "iadd", "add_") and len(tensors) == 2:
            return self._add(node, tensors)
        if len(tensors) == 1:
            if name in _ZERO_PRESERVING_NAMES or name in ("mul", "imul", "truediv", "mul_", "div"):
                return self._moved(node, tensors[0])
            if name in _FLATTENS:
                return self._flatten(node, tensors[0])
            if name == "mean" and len(self._shape(node)) in (2, len(self._shape(node.all_input_nodes[0]))):
                return self._moved(node, tensors[0])
        return self._unknown(f"operation {name!r} at node {node.name!r}", tensors)

    def _add(self, node: fx.Node, tensors: list[_Wire]) -> _Wire:
        a, b = tensors
        if not a.sources or not b.sources:
            return _OPEN
        if (a.axis, a.repeat) != (b.axis, b.repeat):
            return self._unknown(f"addition {node.name!r} of differently laid out channels", tensors)
        return replace(a, sources=a.sources | b.sources)

    def _moved(self, node: fx.Node, wire: _Wire) -> _Wire:
        """The channels stay where they are; a reduction of the other dimensions may leave them last."""
        before, after = self._shape(node.all_input_nodes[0]), self._shape(node)
        if wire.axis < len(after) and before[wire.axis] == after[wire.axis]:
            return wire
        return self._unknown(f"operation at node {node.name!r}, which moves the channels,", [wire])

    def _flatten(self, node: fx.Node, wire: _Wire) -> _Wire:
        before, after = self._shape(node.all_input_nodes[0]), self._shape(node)
        if before == after:
            return wire
        if wire.axis == 1 and len(after) == 2 and after == (before[0], math.prod(before[1:])):
            return replace(wire, repeat=wire.repeat * math.prod(before[2:]))
        return self._unknown(f"reshape {node.name!r} from {before} to {after}", [wire])

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = self.graph.shapes[node]
        assert shape is not None
        return shape

    def _unknown(self, what: str, wires: list[_Wire]) -> _Wire:
        sources = frozenset().union(*(wire.sources for wire in wires))
        if self.lenient:
            return _Wire(sources)
        names = ",".join(sorted(sources))
        raise ModelError(
            f"{what} cannot be analysed: fedprior does not know what it does to a closed unit of {names}. "
            f"Leave those layers without gates (ungated={names}), or use weight-wise gates (fedsparse-unstructured)"
        )


_ALIASES: dict[Callable[..., Any], str] = {operator.add: "add", operator.iadd: "iadd", torch.add: "add"}
_ALIASES |= {getattr(F, name): name for name in _ZERO_PRESERVING_NAMES if hasattr(F, name)}
_ALIASES |= {getattr(torch, name): name for name in _ZERO_PRESERVING_NAMES if hasattr(torch, name)}


def _name_of(target: Any) -> str:
    """A function's plain name; dispatchers such as max_pool2d's hide theirs, so those are looked up."""
    return _ALIASES.get(target) or str(getattr(target, "__name__", target))
