"""Gates: which weights each one switches, how strong its group is, and what survives when some gates are closed.

Every method is a pure function of tensors and works under `torch.func.vmap`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params
from fedprior.units.positions import lasting


class Gating(ABC):
    """A division of (some of) a model's parameters into groups, with one gate per group, listed layer by layer.

    It knows nothing of probabilities or thresholds: those belong to the prior.
    """

    shapes: dict[str, tuple[int, ...]]
    """The shape of every parameter, gated or not."""
    gate_shapes: dict[str, tuple[int, ...]]
    """The shape of each gated layer's gates."""
    narrowed: tuple[str, ...] = ()
    """Parameters from which other layers' gates, not only their own, remove entries."""
    wiring: str = ""
    """Text that says what the gates remove, if names and shapes do not."""
    dense: str = ""
    """Text that says which layers have no gates although they have units."""

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
        """The same, with all layers in one vector."""

    def strengths(self, params: Params) -> Gates:
        """How much influence a group has. Unlike its norm, this ignores rescaling that has no effect on outputs."""
        return self.norms(params)

    def magnitudes(self, params: Params) -> Tensor:
        """‖w_g‖₂ of each group's weights alone, without bias and affine pair of the norm, and without a gradient."""
        return self.joint_norms({name: value.detach() for name, value in params.items()})

    def join(self, gates: Gates) -> Tensor:
        """Join all layers' gates in one vector: arithmetic on one long vector is faster than on many short ones."""
        return torch.cat([gates[layer].reshape(-1) for layer in self.gate_shapes])

    def part(self, joint: Tensor) -> Gates:
        """The inverse of `join`."""
        pieces = joint.split([torch.Size(shape).numel() for shape in self.gate_shapes.values()])
        return {name: p.reshape(shape) for (name, shape), p in zip(self.gate_shapes.items(), pieces, strict=True)}

    def joint_sizes(self, like: Tensor) -> Tensor:
        """How many parameters each gate switches, in one vector with the type and device of `like`."""
        key = (like.dtype, like.device)
        if key not in self._sizes:
            sizes = self.sizes()
            each = [size for layer in self.gate_shapes for size in [sizes[layer]] * self._count(layer)]
            with lasting():
                self._sizes[key] = torch.tensor(each, dtype=like.dtype, device=like.device)
        return self._sizes[key]

    def _count(self, layer: str) -> int:
        return torch.Size(self.gate_shapes[layer]).numel()

    def can_narrow(self, layer: str) -> bool:
        """Whether other layers' gates can remove parameters from this layer's groups."""
        return False

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """How many parameters one gate of each layer switches."""

    @abstractmethod
    def rows(self, gates: Gates) -> Params:
        """For every gated parameter, the gates of its groups, broadcastable to it."""

    @abstractmethod
    def apply(self, params: Params, gates: Gates) -> Params:
        """φ = w ⊙ z, each gate multiplying its own group."""

    def scale(self, params: Params, joint: Tensor) -> Params:
        """The same, with all gates in one vector."""
        return self.apply(params, self.part(joint))

    @abstractmethod
    def mask(self, gates: Gates, own: Gates | None = None) -> Params:
        """For every parameter, broadcastable to it: 1 if it is part of the network that these gates leave, else 0.

        With probabilities instead of zeros and ones, it is the probability of that, for independent gates. Gates that
        close no more than their `own` groups, not what reads them, can be given in addition.
        """

    def prune(self, params: Params, gates: Gates, own: Gates | None = None) -> Params:
        """Set to zero everything outside the network that the gates leave."""
        masks = self.mask(gates, own)
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
        """Open the `least` best-scored gates of any layer with fewer open gates; also say which layers those are."""
        kept, acted = self.joint_floor(self.join(gates), self.join(scores))
        return self.part(kept), acted

    def joint_floor(self, gates: Tensor, scores: Tensor) -> tuple[Tensor, Gates]:
        """The same, with all gates in one vector."""
        kept, acted, parted = {}, {}, self.part(scores)
        for layer, gate in self.part(gates).items():
            flat, score = gate.flatten(), parted[layer].flatten()
            least = min(self.least, flat.shape[0])
            best = torch.zeros_like(flat).scatter(0, score.topk(least).indices, 1.0)
            short = flat.sum() < least
            kept[layer] = torch.where(short, torch.maximum(flat, best), flat)
            acted[layer] = short.to(flat.dtype)
        return self.join(kept), acted

    def totals(self, joint: Tensor) -> Tensor:
        """The sum over each layer's gates, one number per layer."""
        return torch.stack([values.sum() for values in self.part(joint).values()])
