"""Walk over a traced network, operation by operation: which gated layers feed each channel, and what reads them."""

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, fx, nn

from fedprior.core.errors import ModelError
from fedprior.units.attention import ATTENTIVE, find_heads, heads_name, within
from fedprior.units.edges import MOVES, OPEN, Edge, Shapes, labels_of, moved
from fedprior.units.structure import Layer, Reader
from fedprior.units.torch_operations import (
    CONVOLUTIONS,
    INSTANCE_NORMS,
    NORMS,
    ZERO_PRESERVING_MODULES,
    ZERO_PRESERVING_NAMES,
    keeps_zero,
    name_of,
    pooled,
)


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
        self.reads: dict[str, frozenset[str]] = {}
        self.rows_read: dict[str, frozenset[str]] = {}
        """The same, without what reads heads."""
        self.absorbed: dict[str, tuple[str, int, int]] = {}
        """The layers whose units are heads, not rows: these heads, how many rows each has, and in how many runs."""
        self.attended: set[str] = set()
        """The layers whose outputs an attention reads, and the heads that these are."""
        self.stream: set[str] = set()
        """The layers that an attention reads through its projections, those that read attentions, and what a recurrent
        layer reads, which has no gates either."""
        self.sums: list[frozenset[str]] = []

    def run(self) -> "Walk":
        for node in self.graph.module.graph.nodes:  # type: ignore[union-attr]  # an Interpreter's module is a GraphModule
            inputs = [self.edges[n] for n in node.all_input_nodes]
            if node.op == "output":
                self.output = frozenset().union(*(edge.sources for edge in inputs))
            elif node.op == "call_module":
                self.edges[node] = self._called(node, inputs)
            else:
                self.edges[node] = self._operation(node, inputs) if any(edge.sources for edge in inputs) else OPEN
        for name, sources in self.rows_read.items():
            if absorbed := self.absorbed.keys() & sources:
                self._unknown(f"module {name!r}, which reads what an attention reads,", [Edge(frozenset(absorbed))])
        return self

    def residual(self) -> frozenset[str]:
        """The layers that write to the residual stream: what attentions read, what reads them, and what is added."""
        found = set(self.stream)
        while more := {s for sources in self.sums if sources & found for s in sources} - found:
            found |= more
        return frozenset(found)

    def _called(self, node: fx.Node, inputs: list[Edge]) -> Edge:
        if isinstance(self.modules[str(node.target)], ATTENTIVE):
            return self._torch_attention(node, inputs)
        if isinstance(self.modules[str(node.target)], nn.RNNBase):
            self.stream |= {source for edge in inputs for source in edge.sources}
        if len(inputs) > 1 and any(edge.sources for edge in inputs):
            return self._unknown(f"module {str(node.target)!r}, which has several inputs,", inputs)
        return self._module(node, inputs[0] if inputs else OPEN)

    def _operation(self, node: fx.Node, inputs: list[Edge]) -> Edge:
        if self._name(node) in MOVES and self._moves(node):
            return self._move(node)
        if node in self.graph.containers:
            return self._unknown(f"operation {node.name!r}, which returns several tensors,", inputs)
        return OPEN if self.graph.shapes[node] is None else self._function(node, inputs)

    def _module(self, node: fx.Node, edge: Edge) -> Edge:
        name, module = str(node.target), self.modules[str(node.target)]
        if any(True for _ in module.parameters()):
            if name in self.seen and not self.lenient:
                raise ModelError(f"module {name!r} is used twice in the forward pass; use a separate module each time")
            self.seen.add(name)
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            self.reads[name] = edge.sources
            self.rows_read[name] = frozenset() if edge.heads else edge.sources
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
            self.stream |= {name} if edge.sources & self.attended else set()
            if isinstance(module, CONVOLUTIONS) and module.groups != 1:
                self._unknown(f"{what}, a grouped convolution,", [edge])
            if edge.axis != axis:
                self._unknown(f"{what}, which does not read the channel dimension,", [edge])
            if f"{name}.weight" in self.own:
                self.readers.append(Reader(f"{name}.weight", tuple(sorted(edge.sources)), edge.repeat))
        if name in self.excluded:
            return OPEN
        owned = [f"{name}.weight"] + ([f"{name}.bias"] if module.bias is not None else [])
        self._check_own(what, name, owned)
        self.layers[name] = Layer(name, module.weight.shape[0], tuple(owned), kind)
        return Edge(frozenset([name]), axis)

    def _check_own(self, what: str, name: str, owned: Iterable[str]) -> None:
        for parameter in owned:
            if parameter not in self.own and not self.lenient:
                raise ModelError(
                    f"{what} shares {parameter!r} with other code or computes it from other parameters; "
                    f"give it its own parameter, or leave it without gates (ungated={name})"
                )

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
        if source not in self.layers:
            return self._unknown(what, [edge])
        layer = self.layers[source]
        if any(getattr(module, part.rsplit(".", 1)[1]).shape[0] != layer.size for part in affine):
            return self._unknown(f"{what}, which does not have one scale per channel,", [edge])
        self.layers[source] = replace(layer, parameters=(*layer.parameters, *affine))
        return edge

    def _function(self, node: fx.Node, inputs: list[Edge]) -> Edge:
        name, tensors = self._name(node), self._tensors(node)
        if name == "scaled_dot_product_attention":
            return self._attention(node, inputs)
        if name in ("add", "iadd", "add_") and len(tensors) == 2:
            return self._add(node, tensors)
        if len(tensors) == 1:
            edge, what = self.edges[tensors[0]], f"operation {name!r} at node {node.name!r}"
            divides = name in ("truediv", "div") and node.args[:1] == (tensors[0],)
            if divides or name in ("mul", "imul", "mul_") or (name in ZERO_PRESERVING_NAMES and keeps_zero(node)):
                return self._moved(node, edge, what, pooled(name))
            if name == "mean":
                return self._mean(node, edge)
        return self._unknown(f"operation {name!r} at node {node.name!r}", inputs)

    def _add(self, node: fx.Node, tensors: list[fx.Node]) -> Edge:
        a, b = (self.edges[n] for n in tensors)
        ranks = {len(self._shape(n)) for n in tensors}
        self.sums.append(a.sources | b.sources)
        if self.lenient:
            return Edge(a.sources | b.sources, known=False)
        if not a.sources or not b.sources:
            return OPEN
        if (a.axis, a.repeat) != (b.axis, b.repeat) or len(ranks) > 1 or a.axis < 0:
            return self._unknown(f"addition {node.name!r} of differently laid out channels", [a, b])
        return replace(a, sources=a.sources | b.sources)

    def _moved(self, node: fx.Node, edge: Edge, what: str, pooled: int) -> Edge:
        """The channels stay in place, unless they are among the last `pooled` dimensions, which are pooled."""
        if edge.axis < len(self._shape(node)) - pooled and not (edge.axis < 0 and pooled):
            return edge
        return self._unknown(f"{what}, which mixes the channels,", [edge])

    def _mean(self, node: fx.Node, edge: Edge) -> Edge:
        """A mean over dimensions other than the channels. Dimensions before them may vanish."""
        before, after = self._shape(self._tensors(node)[0]), self._shape(node)
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
        dims = given if isinstance(given, (tuple, list)) else [given]
        reduced = {dim % len(before) for dim in dims if isinstance(dim, int)}
        if dims and len(reduced) == len(dims) and edge.axis not in reduced and edge.axis >= 0:
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

    def _name(self, node: fx.Node) -> str:
        return str(node.target) if node.op == "call_method" else name_of(node.target)

    def _moves(self, node: fx.Node) -> bool:
        """Whether an operation only moves the numbers of a single tensor, or takes it out of a container."""
        return all(self.graph.shapes[n] is None for n in node.all_input_nodes[1:]) and not (
            node.all_input_nodes[0] in self.graph.containers and self.edges[node.all_input_nodes[0]].labels is None
        )

    def _move(self, node: fx.Node) -> Edge:
        source = node.all_input_nodes[0]
        edge = self.edges[source]
        # Once several layers are added, or in a walk that skips what it does not know, nothing says where channels are.
        return (
            moved(self.graph, node, source, edge) if edge.known else self._unknown(f"operation {node.name!r}", [edge])
        )

    def _torch_attention(self, node: fx.Node, inputs: list[Edge]) -> Edge:
        """torch's own attention or a block of it: its units are known from its parameters."""
        name = str(node.target)
        sources = frozenset().union(*(edge.sources for edge in inputs))
        if sources and not self.lenient:
            return self._unknown(f"module {name!r}", inputs)
        if name in self.seen and not self.lenient:
            raise ModelError(f"module {name!r} is used twice in the forward pass; use a separate module each time")
        self.seen.add(name)
        found = list(within(name, self.modules[name]))
        for layer, reader, _ in found:
            if layer.size == 1 or layer.name in self.excluded or self._frozen(layer):
                continue
            self._check_own(f"module {layer.name!r}", layer.name, layer.parameters)
            self.layers[layer.name] = layer
            self.fed.add(layer.name)
            self.readers += [reader] if reader.parameter in self.own else []
        self.stream |= sources.union(writer for *_, writer in found)
        return Edge(sources.union(writer for *_, writer in found), known=False) if self.lenient else OPEN

    def _frozen(self, layer: Layer) -> bool:
        graph = self.graph.module
        assert isinstance(graph, nn.Module)
        return any(not graph.get_parameter(name).requires_grad for name in layer.parameters)

    def _attention(self, node: fx.Node, inputs: list[Edge]) -> Edge:
        """Units are heads from here on, in place of the rows of the queries, keys and values."""
        names = ("query", "key", "value")
        read = [node.args[i] if i < len(node.args) else node.kwargs[name] for i, name in enumerate(names)]
        edges = [self.edges[n] for n in read if isinstance(n, fx.Node)]
        every = frozenset().union(*(edge.sources for edge in edges))
        self.stream |= {source for layer in every for source in self.reads.get(layer, ())}
        self.attended |= every
        what = f"attention {node.name!r}"
        others = [self.edges[n] for n in node.all_input_nodes if n not in read]
        if any(edge.sources for edge in others) or not all(edge.known and edge.repeat == 1 for edge in edges):
            return self._unknown(what, inputs)
        if any(not edge.sources for edge in edges):
            return self._without_gates(every)
        if any(len(edge.sources) > 1 for edge in edges) or not every <= self.layers.keys():
            return self._unknown(what, inputs)
        labels = [
            labels_of(edge, self._shape(n)) for edge, n in zip(edges, read, strict=True) if isinstance(n, fx.Node)
        ]
        if node.kwargs.get("enable_gqa"):
            labels[1:] = [part.repeat_interleave(labels[0].shape[-3] // part.shape[-3], -3) for part in labels[1:]]
        sources = [min(edge.sources) for edge in edges]
        sizes = {source: self.layers[source].size for source in every}
        found = find_heads(sources, labels, sizes)
        if found is None:
            return self._unknown(what, inputs)
        name = heads_name(sources)
        if found.number == 1 or name in self.excluded:
            return self._without_gates(every)
        parts = [self.layers.pop(source) for source in dict.fromkeys(sources)]
        owned = tuple(parameter for part in parts for parameter in part.parameters)
        blocks = tuple(found.blocks[part.name] for part in parts for _ in part.parameters)
        self.layers[name] = Layer(name, found.number, owned, "linear", blocks=blocks)
        for part in parts:
            block = found.blocks[part.name]
            self.absorbed[part.name] = name, block, part.size // (block * found.number)
        self.attended |= {name}
        self.fed.add(name)
        return Edge(
            frozenset([name]), -1, found.width, found.labels, found.number * found.width, heads=True, moved=what
        )

    def _without_gates(self, layers: frozenset[str]) -> Edge:
        for layer in layers:
            self.layers.pop(layer, None)
        return Edge(layers, known=False) if self.lenient else OPEN

    def _tensors(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self.graph.shapes[n] is not None]

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = self.graph.shapes[node]
        assert shape is not None
        return shape

    def _unknown(self, what: str, edges: list[Edge]) -> Edge:
        sources = frozenset().union(*(edge.sources for edge in edges))
        if self.lenient:
            return Edge(sources, known=False)
        what = next((edge.moved for edge in edges if edge.moved), what)
        names = ",".join(sorted(sources))
        raise ModelError(
            f"{what} cannot be analysed: fedprior does not know what it does to a closed unit of {names}. "
            f"Leave those layers without gates (ungated={names}), or use weight-wise gates (structured=false)"
        )
