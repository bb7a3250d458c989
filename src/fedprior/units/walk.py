"""Walk over a traced network, operation by operation: which gated layers feed each channel, and what reads them."""

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from fedprior.core.errors import ModelError
from fedprior.units.structure import Layer, Reader
from fedprior.units.torch_operations import (
    CONVOLUTIONS,
    FLATTENS,
    INSTANCE_NORMS,
    NORMS,
    ZERO_PRESERVING_MODULES,
    ZERO_PRESERVING_NAMES,
    keeps_zero,
    name_of,
    pooled,
)


@dataclass(frozen=True)
class Edge:
    """A tensor's channels. Without sources, something ungated contributes, so no channel ever falls silent."""

    sources: frozenset[str] = frozenset()
    axis: int = 1
    repeat: int = 1


OPEN = Edge()


class Shapes(fx.Interpreter):
    """Runs the graph once and keeps the shape of every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.shapes: dict[fx.Node, tuple[int, ...] | None] = {}
        self.containers: set[fx.Node] = set()
        """Values that are not tensors but contain some, such as the result of `chunk` or of a recurrent layer."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n] = tuple(value.shape) if isinstance(value, Tensor) else None
        if isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
            self.containers.add(n)
        return value


class Walk:
    """One pass over the traced graph, operation by operation."""

    def __init__(self, graph: Shapes, own: frozenset[str], excluded: frozenset[str], *, lenient: bool) -> None:
        self.graph = graph
        self.own = own
        self.modules = dict(graph.module.named_modules())
        self.excluded = excluded
        self.lenient = lenient
        self.edges: dict[fx.Node, Edge] = {}
        self.layers: dict[str, Layer] = {}
        self.readers: list[Reader] = []
        self.output: frozenset[str] = frozenset()
        self.seen: set[str] = set()
        self.linear: list[str] = []
        self.fed: set[str] = set()
        """The layers that read another layer's units."""

    def run(self) -> "Walk":
        for node in self.graph.module.graph.nodes:  # type: ignore[union-attr]  # an Interpreter's module is a GraphModule
            inputs = [self.edges[n] for n in node.all_input_nodes]
            gated = [edge for edge in inputs if edge.sources]
            if node.op == "output":
                self.output = frozenset().union(*(edge.sources for edge in inputs))
            elif node.op == "call_module" and gated and len(inputs) > 1:
                self.edges[node] = self._unknown(f"module {str(node.target)!r}, which has several inputs,", inputs)
            elif node.op == "call_module":
                self.edges[node] = self._module(node, inputs[0] if inputs else OPEN)
            elif not gated:
                self.edges[node] = OPEN
            elif node in self.graph.containers:
                self.edges[node] = self._unknown(f"operation {node.name!r}, which returns several tensors,", inputs)
            elif self.graph.shapes[node] is None:
                self.edges[node] = OPEN
            else:
                self.edges[node] = self._function(node, inputs)
        return self

    def _module(self, node: fx.Node, edge: Edge) -> Edge:
        name, module = str(node.target), self.modules[str(node.target)]
        if any(True for _ in module.parameters()):
            if name in self.seen and not self.lenient:
                raise ModelError(f"module {name!r} is used twice in the forward pass; use a separate module each time")
            self.seen.add(name)
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            return self._layer(node, name, module, edge)
        if not edge.sources:
            return OPEN
        if isinstance(module, NORMS):
            return self._norm(node, name, module, edge)
        what = f"module {name!r} ({type(module).__name__})"
        if node in self.graph.containers or (isinstance(module, nn.Hardtanh) and not keeps_zero(module)):
            return self._unknown(what, [edge])
        if isinstance(module, ZERO_PRESERVING_MODULES):
            return self._moved(node, edge, what, pooled(type(module).__name__))
        if isinstance(module, nn.Flatten):
            return self._flatten(node, edge)
        return self._unknown(what, [edge])

    def _layer(self, node: fx.Node, name: str, module: nn.Module, edge: Edge) -> Edge:
        what = f"module {name!r} ({type(module).__name__})"
        assert isinstance(module.weight, Tensor)
        kind = "linear" if isinstance(module, nn.Linear) else "conv"
        rank = len(self._shape(node))
        axis = rank - 1 if kind == "linear" else 1
        self.linear += [name] if kind == "linear" else []
        if edge.sources:
            self.fed.add(name)
            if isinstance(module, CONVOLUTIONS) and module.groups != 1:
                self._unknown(f"{what}, a grouped convolution,", [edge])
            if edge.axis != axis:
                self._unknown(f"{what}, which does not read the channel dimension,", [edge])
            if f"{name}.weight" in self.own:
                self.readers.append(Reader(f"{name}.weight", tuple(sorted(edge.sources)), edge.repeat))
        if name in self.excluded:
            return OPEN
        owned = [f"{name}.weight"] + ([f"{name}.bias"] if module.bias is not None else [])
        for parameter in owned:
            if parameter not in self.own and not self.lenient:
                raise ModelError(
                    f"{what} shares {parameter!r} with other code or computes it from other parameters; "
                    f"give it its own parameter, or leave it without gates (ungated={name})"
                )
        self.layers[name] = Layer(name, module.weight.shape[0], tuple(owned), kind)
        return Edge(frozenset([name]), axis)

    def _norm(self, node: fx.Node, name: str, module: nn.Module, edge: Edge) -> Edge:
        what = f"module {name!r} ({type(module).__name__})"
        if len(edge.sources) != 1 or edge.repeat != 1:
            return self._unknown(f"{what}, which normalises several layers' outputs at once,", [edge])
        affine = [f"{name}.{part}" for part in ("weight", "bias") if getattr(module, part, None) is not None]
        if not affine and (not isinstance(module, INSTANCE_NORMS) or module.track_running_stats):
            # A norm without an affine pair shifts a silent channel by the mean of the others, or by a running mean.
            return self._unknown(f"{what} without affine parameters", [edge])
        if any(parameter not in self.own for parameter in affine):
            return self._unknown(f"{what}, whose parameters are frozen or shared,", [edge])
        rank = len(self._shape(node))
        first = rank - len(module.normalized_shape) if isinstance(module, nn.LayerNorm) else 1
        if edge.axis != first:
            return self._unknown(f"{what}, which does not normalise the channel dimension,", [edge])
        (source,) = edge.sources
        layer = self.layers[source]
        if any(getattr(module, part.rsplit(".", 1)[1]).shape[0] != layer.size for part in affine):
            return self._unknown(f"{what}, which does not have one scale per channel,", [edge])
        self.layers[source] = replace(layer, parameters=(*layer.parameters, *affine))
        return edge

    def _function(self, node: fx.Node, inputs: list[Edge]) -> Edge:
        name = str(node.target) if node.op == "call_method" else name_of(node.target)
        tensors = self._tensors(node)
        if name in ("add", "iadd", "add_") and len(tensors) == 2:
            return self._add(node, tensors)
        if len(tensors) == 1:
            edge, what = self.edges[tensors[0]], f"operation {name!r} at node {node.name!r}"
            divides = name in ("truediv", "div") and node.args[:1] == (tensors[0],)
            if divides or name in ("mul", "imul", "mul_") or (name in ZERO_PRESERVING_NAMES and keeps_zero(node)):
                return self._moved(node, edge, what, pooled(name))
            if name in FLATTENS:
                return self._flatten(node, edge)
            if name == "mean":
                return self._mean(node, edge)
        return self._unknown(f"operation {name!r} at node {node.name!r}", inputs)

    def _add(self, node: fx.Node, tensors: list[fx.Node]) -> Edge:
        a, b = (self.edges[n] for n in tensors)
        ranks = {len(self._shape(n)) for n in tensors}
        if self.lenient:
            return Edge(a.sources | b.sources)
        if not a.sources or not b.sources:
            return OPEN
        if (a.axis, a.repeat) != (b.axis, b.repeat) or len(ranks) > 1:
            return self._unknown(f"addition {node.name!r} of differently laid out channels", [a, b])
        return replace(a, sources=a.sources | b.sources)

    def _moved(self, node: fx.Node, edge: Edge, what: str, pooled: int) -> Edge:
        """The channels stay in place, unless they are among the last `pooled` dimensions, which are pooled."""
        if edge.axis < len(self._shape(node)) - pooled:
            return edge
        return self._unknown(f"{what}, which mixes the channels,", [edge])

    def _mean(self, node: fx.Node, edge: Edge) -> Edge:
        """A mean over dimensions other than the channels. Dimensions before them may vanish."""
        before, after = self._shape(self._tensors(node)[0]), self._shape(node)
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
        dims = given if isinstance(given, (tuple, list)) else [given]
        reduced = {dim % len(before) for dim in dims if isinstance(dim, int)}
        if dims and len(reduced) == len(dims) and edge.axis not in reduced:
            gone = sum(dim < edge.axis for dim in reduced) if len(after) < len(before) else 0
            return replace(edge, axis=edge.axis - gone)
        return self._unknown(f"mean {node.name!r} over the channels", [edge])

    def _flatten(self, node: fx.Node, edge: Edge) -> Edge:
        before, after = self._shape(self._tensors(node)[0]), self._shape(node)
        if before == after:
            return edge
        if edge.axis == 1 and len(after) == 2 and after == (before[0], math.prod(before[1:])):
            return replace(edge, repeat=edge.repeat * math.prod(before[2:]))
        return self._unknown(f"reshape {node.name!r} from {before} to {after}", [edge])

    def _tensors(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self.graph.shapes[n] is not None]

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = self.graph.shapes[node]
        assert shape is not None
        return shape

    def _unknown(self, what: str, edges: list[Edge]) -> Edge:
        sources = frozenset().union(*(edge.sources for edge in edges))
        if self.lenient:
            return Edge(sources)
        names = ",".join(sorted(sources))
        raise ModelError(
            f"{what} cannot be analysed: fedprior does not know what it does to a closed unit of {names}. "
            f"Leave those layers without gates (ungated={names}), or use weight-wise gates (structured=false)"
        )
