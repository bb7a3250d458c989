"""One gate per unit: a filter or a neuron."""

import torch
from torch import Tensor

from fedprior.core.trees import Gates, Params
from fedprior.units.gating import Gating
from fedprior.units.positions import Positions
from fedprior.units.rows import MOST, Rows, row_norms, scale_rows
from fedprior.units.structure import Layer, Reader, Structure


class UnitGating(Gating):
    """One gate per unit: a filter or neuron together with the columns that read it downstream."""

    def __init__(self, structure: Structure, *, floor: int = 1) -> None:
        super().__init__(floor)
        self.structure = structure
        self.shapes, self.dense = structure.shapes, structure.dense
        self.gate_shapes = {layer.name: (layer.size,) for layer in structure.layers}
        self.axes = {layer.name: layer.axis for layer in structure.layers}
        self.wiring = repr((structure.layers, structure.readers))
        self.positions = Positions(structure, floor)
        self.listeners = _listeners(structure)
        heard = (parameter for source, _, _ in self.listeners for parameter in structure.owned[source])
        self.narrowed = tuple(dict.fromkeys([*(reader.parameter for reader in self.positions.readers), *heard]))
        self.by_rows = self._rows(structure)

    def _rows(self, structure: Structure) -> tuple[Rows, ...] | None:
        """The layers as rows of matrices and entries of vectors, or None if some have another form."""
        for layer in structure.layers:
            ranks = [len(self.shapes[name]) for name in layer.parameters]
            plain = layer.axis == 0 and not layer.columns and not layer.blocks
            if not plain or len(ranks) > MOST or any(rank > 1 for rank in ranks[1:]):
                return None
        return tuple(Rows(layer.size, len(layer.parameters)) for layer in structure.layers) or None

    def magnitudes(self, params: Params) -> Tensor:
        if self.by_rows:
            return row_norms([params[layer.parameters[0]] for layer in self.structure.layers])
        return torch.cat([self._weight_norms(layer, params) for layer in self.structure.layers]).detach()

    def _weight_norms(self, layer: Layer, params: Params) -> Tensor:
        """The norms of a layer's groups, of their matrices alone."""
        matrices = [i for i, name in enumerate(layer.owned) if len(self.shapes[name]) > 1]
        parts = [self._part_norms(layer, i, params) for i in matrices]
        joint: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0) if len(parts) > 1 else parts[0]
        return joint

    def scale(self, params: Params, joint: Tensor) -> Params:
        if not self.by_rows:
            return super().scale(params, joint)
        names = self._owned()
        scaled = scale_rows(self.by_rows, joint, [params[name] for name in names])
        return {**params, **dict(zip(names, scaled, strict=True))}

    def prune(self, params: Params, gates: Gates, own: Gates | None = None) -> Params:
        joint = self.join(gates)
        if not (self.by_rows and scale_rows.usable(self.by_rows, joint, [])):
            return super().prune(params, gates, own)
        pruned = self.scale(params, joint if own is None else joint * self.join(own))
        for reader, values in self._columns(joint):
            columns = self._along(values, reader.parameter, 1)
            pruned[reader.parameter] = pruned[reader.parameter] * columns
        return pruned

    def _owned(self) -> list[str]:
        """The gated parameters, layer by layer."""
        return [name for layer in self.structure.layers for name in layer.parameters]

    def joint_norms(self, params: Params) -> Tensor:
        most = max(len(layer.owned) for layer in self.structure.layers)
        parts = [
            torch.cat([self._part_norms(layer, i, params) for layer in self.structure.layers]) for i in range(most)
        ]
        joint: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0) if most > 1 else parts[0]
        return joint

    def _part_norms(self, layer: Layer, index: int, params: Params) -> Tensor:
        """The norms of what each unit has of a layer's `index`-th parameter; zeros if it has fewer."""
        if index >= len(layer.owned):
            return params[layer.parameters[0]].new_zeros(layer.size)
        values = params[layer.owned[index]].transpose(0, layer.axis if index < len(layer.parameters) else 1)
        if layer.blocks:
            values = values.unflatten(0, (-1, layer.size, layer.blocks[index])).transpose(0, 1).flatten(1)
        norms: Tensor = torch.linalg.vector_norm(values.reshape(layer.size, -1), dim=1) if values.dim() > 1 else values
        return norms

    def strengths(self, params: Params) -> Gates:
        """The norm of the weights that make a unit, times the norm of those that read it. For a component of an
        adapter, this is the norm of its product."""
        heard: Gates = {}
        for reader in self.structure.readers:
            squares = params[reader.parameter].square().transpose(0, 1).flatten(1).sum(1)
            for source in reader.sources:
                if self.axes.get(source) == 0:
                    read = squares.unflatten(0, (-1, reader.repeat)).sum(1)
                    # A single channel that is added to many is read wherever those are.
                    read = read.sum(0, keepdim=True) if self.gate_shapes[source] == (1,) else read
                    heard[source] = heard.get(source, 0.0) + read
        norms = self.norms(params)
        for layer in self.structure.layers:
            if layer.columns:
                norms[layer.name] = self._part_norms(layer, 0, params)
                heard[layer.name] = self._part_norms(layer, 1, params).square()
        return {layer: norm * heard[layer].sqrt() if layer in heard else norm for layer, norm in norms.items()}

    def can_narrow(self, layer: str) -> bool:
        return any(found.name == layer and found.parameters[0] in self.narrowed for found in self.structure.layers)

    def sizes(self) -> dict[str, int]:
        return {
            layer.name: sum(torch.Size(self.shapes[name]).numel() // layer.size for name in layer.owned)
            for layer in self.structure.layers
        }

    def rows(self, gates: Gates) -> Params:
        found: Params = {}
        for layer in self.structure.layers:
            gate = gates[layer.name]
            for i, name in enumerate(layer.parameters):
                found[name] = self._along(self._blocks(layer, i, gate), name, layer.axis)
            found |= {name: self._along(gate, name, 1) for name in layer.columns}
        return found

    def _blocks(self, layer: Layer, index: int, gate: Tensor) -> Tensor:
        """The gate of every row of a layer's `index`-th parameter."""
        if not layer.blocks:
            return gate
        rows, block = self.shapes[layer.parameters[index]][0], layer.blocks[index]
        return gate.repeat_interleave(block).repeat(rows // (layer.size * block))

    def _along(self, values: Tensor, parameter: str, axis: int) -> Tensor:
        """Reshape values for the rows (axis 0) or columns (axis 1) of a parameter, to broadcast to it."""
        rank = len(self.shapes[parameter])
        return values.reshape(*[1] * axis, -1, *[1] * (rank - 1 - axis))

    def apply(self, params: Params, gates: Gates) -> Params:
        rows = self.rows(gates)
        return {name: value * rows[name] if name in rows else value for name, value in params.items()}

    def mask(self, gates: Gates, own: Gates | None = None) -> Params:
        joint = self.join(gates)
        masks = self.rows(gates if own is None else self.part(joint * self.join(own)))

        def narrow(parameter: str, values: Tensor, axis: int) -> None:
            values = self._along(values, parameter, axis)
            masks[parameter] = masks[parameter] * values if parameter in masks else values

        for source, values in self._heard(
            gates
        ).items():  # a unit that nothing reads is gone, even if its own gate is open
            for parameter in self.structure.owned[source]:
                narrow(parameter, values, 0)
        for reader, values in self._columns(joint):
            narrow(reader.parameter, values, 1)
        return masks

    def _columns(self, joint: Tensor) -> list[tuple[Reader, Tensor]]:
        """For every reader that can fall silent, all at once: whether any source still feeds each column."""
        if not self.positions.readers:
            return []
        closed = 1 - joint
        heard, unheard = (self.positions.on(name, closed.device) for name in ("heard", "unheard"))
        silent = closed[heard].masked_fill(unheard, 1.0).prod(-1)
        pieces = (1 - silent).split(self.positions.columns)
        return [
            (reader, piece if reader.repeat == 1 else piece.repeat_interleave(reader.repeat))
            for reader, piece in zip(self.positions.readers, pieces, strict=True)
        ]

    def joint_floor(self, gates: Tensor, scores: Tensor) -> tuple[Tensor, Gates]:
        """As in the base class, but for all layers at once."""
        places, absent, back, least = (
            self.positions.on(name, gates.device) for name in ("gates", "absent", "back", "least")
        )
        gate, score = gates[places].masked_fill(absent, 0.0), scores[places].masked_fill(absent, -torch.inf)
        best = torch.zeros_like(gate).scatter(1, score.topk(min(self.least, score.shape[1])).indices, 1.0)
        short = gate.sum(1) < least
        kept = torch.where(short[:, None], torch.maximum(gate, best), gate).flatten()[back]
        acted = short.to(gates.dtype)
        return kept, {layer: acted[i] for i, layer in enumerate(self.gate_shapes)}

    def totals(self, joint: Tensor) -> Tensor:
        places, absent = (self.positions.on(name, joint.device) for name in ("gates", "absent"))
        return joint[places].masked_fill(absent, 0.0).sum(1)

    def _heard(self, gates: Gates) -> Gates:
        """For each source whose readers all have gates on their inputs: whether any of them reads each unit."""
        deaf: Gates = {}
        for source, layer, repeat in self.listeners:
            deaf[source] = deaf.get(source, 1.0) * (1 - gates[layer].reshape(-1, repeat)).prod(1)
        return {source: 1 - values for source, values in deaf.items()}


def _listeners(structure: Structure) -> list[tuple[str, str, int]]:
    """The sources whose readers all have gates on their inputs, with each such reader's layer and repeat."""
    on_inputs = {layer.name for layer in structure.layers if layer.axis == 1}
    pairs = [(s, r.parameter.removesuffix(".weight"), r.repeat) for r in structure.readers for s in r.sources]
    loud = {source for source, layer, _ in pairs if layer not in on_inputs or source not in structure.owned}
    return [pair for pair in pairs if pair[0] not in loud]
