"""The positions of a structure's gates in one vector. With them, one lookup serves all layers.

On a GPU, launching many short operations, layer by layer, costs more than the work they do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from fedprior.units.structure import Reader, Structure


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors in this block that stay usable afterwards.

    Within `torch.func.grad` they would be wrappers that cannot be copied later, and within inference mode they could
    not take part in gradients.
    """
    with torch._C._DisableFuncTorch(), torch.inference_mode(False):
        yield


class Positions:
    """Constants of a structure, kept on every device that asked for them."""

    def __init__(self, structure: Structure, least: int) -> None:
        sizes = {layer.name: layer.size for layer in structure.layers}
        first = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
        gated = {layer.name for layer in structure.layers if layer.axis == 0}
        self.readers: list[Reader] = [r for r in structure.readers if gated.issuperset(r.sources)]
        """The readers that receive nothing once all their sources' gates are closed."""
        self.columns = [max(sizes[source] for source in reader.sources) for reader in self.readers]
        """How many channels each of them reads."""
        heard = torch.full((sum(self.columns), max((len(r.sources) for r in self.readers), default=0)), -1)
        for reader, size, start in zip(self.readers, self.columns, accumulate([0, *self.columns]), strict=False):
            for i, source in enumerate(reader.sources):
                # A single channel that is added to many reaches each of them.
                heard[start : start + size, i] = first[source] + torch.arange(size).clamp(max=sizes[source] - 1)
        layers = torch.full((len(sizes), max(sizes.values(), default=0)), -1)
        for line, (name, size) in zip(layers, sizes.items(), strict=True):
            line[:size] = torch.arange(first[name], first[name] + size)
        self._constants = {
            # For each channel of all readers, the positions of the gates that feed it; some have fewer than others.
            "heard": heard.clamp(min=0),
            "unheard": heard < 0,
            # For each layer, the positions of its gates, the inverse map, and how many gates must stay open.
            "gates": layers.clamp(min=0),
            "absent": layers < 0,
            "back": (layers.flatten() >= 0).nonzero()[:, 0],
            "least": (layers >= 0).sum(1).clamp(max=least),
        }
        self._copies: dict[tuple[str, torch.device], Tensor] = {}

    def on(self, name: str, device: torch.device) -> Tensor:
        """Some positions on a device, copied there once: a captured CUDA graph cannot copy from the host."""
        key = (name, device)
        if key not in self._copies:
            with lasting():
                self._copies[key] = self._constants[name].to(device)
        return self._copies[key]
