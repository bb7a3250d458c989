"""Gates: which weights one switches, how strong a group is, and what survives when some are closed.

Every method is a pure function of tensors and works under `torch.func.vmap`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedprior import kernels
from fedprior.errors import SettingError
from fedprior.kernels import gates as gate_kernels
from fedprior.trees import Gates, Params
from fedprior.units.structure import Layer, Reader, Structure
from fedprior.units.tables import Tables, lasting


class Gating(ABC):
    """A division of (some of) a model's parameters into groups, one gate a group, gates listed layer by layer.

    It knows nothing of probabilities or thresholds: those belong to the prior.
    """

    shapes: dict[str, tuple[int, ...]]
    """Of every parameter, gated or not."""
    gate_shapes: dict[str, tuple[int, ...]]
    """Of the gates of every gated layer."""
    narrowed: tuple[str, ...] = ()
    """Parameters of which other layers' gates take something away, beside those of their own."""
    wiring: str = ""
    """What the gates remove, as text, where names and shapes do not say it."""

    def __init__(self, floor: int) -> None:
        if floor < 1:
            raise SettingError(f"floor must be at least 1, got {floor}: a layer without units passes nothing on")
        self.least = floor
        self._sizes: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def norms(self, params: Params) -> Gates:
        """‖w_g‖₂ of every group."""
        return self.part(self.joint_norms(params))

    @abstractmethod
    def joint_norms(self, params: Params) -> Tensor:
        """The same, all layers in one vector."""

    def strengths(self, params: Params) -> Gates:
        """How much a group has to say; unlike its norm, the same when a network is rescaled without effect."""
        return self.norms(params)

    def detached_norms(self, params: Params) -> Tensor:
        """`joint_norms` without a gradient, which may then be faster."""
        return self.joint_norms({name: value.detach() for name, value in params.items()})

    def join(self, gates: Gates) -> Tensor:
        """The gates of all layers in one vector: arithmetic on one long vector costs less than on many short ones."""
        return torch.cat([gates[layer].reshape(-1) for layer in self.gate_shapes])

    def part(self, joint: Tensor) -> Gates:
        """The inverse of `join`."""
        pieces = joint.split([torch.Size(shape).numel() for shape in self.gate_shapes.values()])
        return {name: p.reshape(shape) for (name, shape), p in zip(self.gate_shapes.items(), pieces, strict=True)}

    def joint_sizes(self, like: Tensor) -> Tensor:
        """How many parameters each gate switches, in one vector of the kind of `like`."""
        key = (like.dtype, like.device)
        if key not in self._sizes:
            sizes = self.sizes()
            each = [size for layer in self.gate_shapes for size in [sizes[layer]] * self._count(layer)]
            with lasting():
                self._sizes[key] = torch.tensor(each, dtype=like.dtype, device=like.device)
        return self._sizes[key]

    def _count(self, layer: str) -> int:
        return torch.Size(self.gate_shapes[layer]).numel()

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """How many parameters one gate of each layer switches."""

    @abstractmethod
    def rows(self, gates: Gates) -> Params:
        """For every gated parameter, broadcastable to it, the gate of the group it belongs to."""

    @abstractmethod
    def apply(self, params: Params, gates: Gates) -> Params:
        """φ = w ⊙ z, each gate multiplying its own group."""

    def scale(self, params: Params, joint: Tensor) -> Params:
        """The same with all gates in one vector."""
        return self.apply(params, self.part(joint))

    @abstractmethod
    def mask(self, gates: Gates) -> Params:
        """For every parameter, broadcastable to it: is it part of the network these gates leave?

        With probabilities instead of zeros and ones, the probability that it is, for independent gates.
        """

    def prune(self, params: Params, gates: Gates) -> Params:
        """Set everything outside the network that the gates leave to zero."""
        masks = self.mask(gates)
        return {name: value * masks[name].to(value.dtype) if name in masks else value for name, value in params.items()}

    def effective_parameters(self, gates: Gates) -> Tensor:
        """The size of the network that the gates leave."""
        masks = self.mask(gates)
        sizes = {name: torch.Size(shape).numel() for name, shape in self.shapes.items()}
        left = [mask.double().sum() * (sizes[name] / mask.numel()) for name, mask in masks.items()]
        return torch.stack(left).sum() + (self.parameters - sum(sizes[name] for name in masks))

    @property
    def parameters(self) -> int:
        """The size of the dense network."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def all_open(self, like: Params) -> Gates:
        """Every gate open."""
        some = next(iter(like.values()))
        return {layer: some.new_ones(shape) for layer, shape in self.gate_shapes.items()}

    def floor(self, gates: Gates, scores: Gates) -> tuple[Gates, Gates]:
        """Keep the `least` best-scored gates of a layer that would lose more; say in which layers that happened."""
        kept, acted = {}, {}
        for layer, gate in gates.items():
            flat, score = gate.flatten(), scores[layer].flatten()
            least = min(self.least, flat.shape[0])
            best = torch.zeros_like(flat).scatter(0, score.topk(least).indices, 1.0)
            short = flat.sum() < least
            kept[layer] = torch.where(short, torch.maximum(flat, best), flat).reshape(gate.shape)
            acted[layer] = short.to(flat.dtype)
        return kept, acted


class UnitGating(Gating):
    """One gate a unit: a filter or neuron, and with it the columns that read it downstream."""

    def __init__(self, structure: Structure, *, floor: int = 1) -> None:
        super().__init__(floor)
        self.structure = structure
        self.shapes = structure.shapes
        self.gate_shapes = {layer.name: (layer.size,) for layer in structure.layers}
        self.axes = {layer.name: layer.axis for layer in structure.layers}
        self.wiring = repr((structure.layers, structure.readers))
        self.tables = Tables(structure, floor)
        self.listeners = _listeners(structure)
        heard = (parameter for source, _, _ in self.listeners for parameter in structure.owned[source])
        self.narrowed = tuple(dict.fromkeys([*(reader.parameter for reader in self.tables.readers), *heard]))
        self.fused = self._fused(structure)

    def _fused(self, structure: Structure) -> gate_kernels.Layers | None:
        """The layers as the GPU's kernels take them; None: some have another form."""
        for layer in structure.layers:
            ranks = [len(self.shapes[name]) for name in layer.parameters]
            if layer.axis != 0 or len(ranks) > gate_kernels.MOST or any(rank > 1 for rank in ranks[1:]):
                return None
        return tuple(gate_kernels.Gated(layer.size, len(layer.parameters)) for layer in structure.layers) or None

    def detached_norms(self, params: Params) -> Tensor:
        if self.fused and kernels.usable(next(iter(params.values()))):
            return gate_kernels.norms(self.fused, [params[name] for name in self._owned()])
        return super().detached_norms(params)

    def scale(self, params: Params, joint: Tensor) -> Params:
        if self.fused and kernels.usable(joint):
            names = self._owned()
            scaled = gate_kernels.scale(self.fused, joint, [params[name] for name in names])
            return {**params, **dict(zip(names, scaled, strict=True))}
        return super().scale(params, joint)

    def prune(self, params: Params, gates: Gates) -> Params:
        joint = self.join(gates)
        if not (self.fused and kernels.usable(joint)):
            return super().prune(params, gates)
        pruned = self.scale(params, joint)
        for reader, values in self._columns(joint):
            columns = self._along(values, reader.parameter, 1)
            pruned[reader.parameter] = pruned[reader.parameter] * columns
        return pruned

    def _owned(self) -> list[str]:
        """The gated parameters, layer by layer."""
        return [name for layer in self.structure.layers for name in layer.parameters]

    def joint_norms(self, params: Params) -> Tensor:
        most = max(len(layer.parameters) for layer in self.structure.layers)
        parts = [
            torch.cat([self._part_norms(layer, i, params) for layer in self.structure.layers]) for i in range(most)
        ]
        joint: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0) if most > 1 else parts[0]
        return joint

    def _part_norms(self, layer: Layer, index: int, params: Params) -> Tensor:
        """The norms of the rows (or columns) of a layer's `index`-th parameter; zeros if it has fewer."""
        if index >= len(layer.parameters):
            return params[layer.parameters[0]].new_zeros(layer.size)
        values = params[layer.parameters[index]].transpose(0, layer.axis)
        norms: Tensor = torch.linalg.vector_norm(values.reshape(layer.size, -1), dim=1) if values.dim() > 1 else values
        return norms

    def strengths(self, params: Params) -> Gates:
        """The norm of the weights that make a unit, times the norm of those that read it."""
        heard: Gates = {}
        for reader in self.structure.readers:
            squares = params[reader.parameter].square().transpose(0, 1).flatten(1).sum(1)
            for source in reader.sources:
                if self.axes.get(source) == 0:
                    read = squares.unflatten(0, (-1, reader.repeat)).sum(1)
                    # A single channel that is added to many is read wherever they are.
                    read = read.sum(0, keepdim=True) if self.gate_shapes[source] == (1,) else read
                    heard[source] = heard.get(source, 0.0) + read
        norms = self.norms(params)
        return {layer: norm * heard[layer].sqrt() if layer in heard else norm for layer, norm in norms.items()}

    def sizes(self) -> dict[str, int]:
        return {
            layer.name: sum(torch.Size(self.shapes[name]).numel() // layer.size for name in layer.parameters)
            for layer in self.structure.layers
        }

    def rows(self, gates: Gates) -> Params:
        return {
            name: self._along(gates[layer.name], name, layer.axis)
            for layer in self.structure.layers
            for name in layer.parameters
        }

    def _along(self, values: Tensor, parameter: str, axis: int) -> Tensor:
        """Values for the rows (axis 0) or columns (axis 1) of a parameter, broadcastable to it."""
        rank = len(self.shapes[parameter])
        return values.reshape(*[1] * axis, -1, *[1] * (rank - 1 - axis))

    def apply(self, params: Params, gates: Gates) -> Params:
        rows = self.rows(gates)
        return {name: value * rows[name] if name in rows else value for name, value in params.items()}

    def mask(self, gates: Gates) -> Params:
        masks = self.rows(gates)

        def narrow(parameter: str, values: Tensor, axis: int) -> None:
            values = self._along(values, parameter, axis)
            masks[parameter] = masks[parameter] * values if parameter in masks else values

        for source, values in self._heard(
            gates
        ).items():  # a unit that nobody reads is gone, though its own gate be open
            for parameter in self.structure.owned[source]:
                narrow(parameter, values, 0)
        for reader, values in self._columns(self.join(gates)):
            narrow(reader.parameter, values, 1)
        return masks

    def _columns(self, joint: Tensor) -> list[tuple[Reader, Tensor]]:
        """For every reader that can fall silent, all at once: is a column heard from any of its sources?"""
        if not self.tables.readers:
            return []
        closed = 1 - joint
        heard, unheard = (self.tables.on(name, closed.device) for name in ("heard", "unheard"))
        silent = closed[heard].masked_fill(unheard, 1.0).prod(-1)
        pieces = (1 - silent).split(self.tables.columns)
        return [
            (reader, piece if reader.repeat == 1 else piece.repeat_interleave(reader.repeat))
            for reader, piece in zip(self.tables.readers, pieces, strict=True)
        ]

    def floor(self, gates: Gates, scores: Gates) -> tuple[Gates, Gates]:
        """As in the base class, all layers at once."""
        joint, scored = self.join(gates), self.join(scores)
        places, absent, back, least = (
            self.tables.on(name, joint.device) for name in ("gates", "absent", "back", "least")
        )
        gate, score = joint[places].masked_fill(absent, 0.0), scored[places].masked_fill(absent, -torch.inf)
        best = torch.zeros_like(gate).scatter(1, score.topk(min(self.least, score.shape[1])).indices, 1.0)
        short = gate.sum(1) < least
        kept = torch.where(short[:, None], torch.maximum(gate, best), gate).flatten()[back]
        acted = short.to(joint.dtype)
        return self.part(kept), {layer: acted[i] for i, layer in enumerate(self.gate_shapes)}

    def _heard(self, gates: Gates) -> Gates:
        """Of each source all of whose readers have gates on their inputs: is a unit read through any of them?"""
        deaf: Gates = {}
        for source, layer, repeat in self.listeners:
            deaf[source] = deaf.get(source, 1.0) * (1 - gates[layer].reshape(-1, repeat)).prod(1)
        return {source: 1 - values for source, values in deaf.items()}


def _listeners(structure: Structure) -> list[tuple[str, str, int]]:
    """Sources all of whose readers have gates on their inputs, with each such reader's layer and repeat."""
    on_inputs = {layer.name for layer in structure.layers if layer.axis == 1}
    pairs = [(s, r.parameter.removesuffix(".weight"), r.repeat) for r in structure.readers for s in r.sources]
    loud = {source for source, layer, _ in pairs if layer not in on_inputs or source not in structure.owned}
    return [pair for pair in pairs if pair[0] not in loud]


class WeightGating(Gating):
    """One gate a weight, for weights of two dimensions or more. Works for any model; nothing dies downstream.

    Biases and norms stay dense: they are few, and a norm's bias starts at zero, below any threshold.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], *, floor: int = 1) -> None:
        super().__init__(floor)
        self.shapes = shapes
        self.gate_shapes = {name: shape for name, shape in shapes.items() if len(shape) > 1}

    def joint_norms(self, params: Params) -> Tensor:
        return self.join(params).abs()

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.gate_shapes, 1)

    def rows(self, gates: Gates) -> Params:
        return dict(gates)

    def apply(self, params: Params, gates: Gates) -> Params:
        return {name: value * gates[name] if name in gates else value for name, value in params.items()}

    def mask(self, gates: Gates) -> Params:
        return dict(gates)
