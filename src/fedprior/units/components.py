"""The units of a network with adapters: their components of rank one."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from fedprior.core.adapters import find_adapters
from fedprior.core.errors import ModelError
from fedprior.units.structure import Layer, Structure


def find_components(model: nn.Module, ungated: Iterable[str]) -> Structure | None:
    """One unit per component, row i of A and column i of B; None for a network without adapters.

    Everything else that is trained, such as a new head, has no gates. This needs no trace of the network.
    """
    adapters, uses = find_adapters(model), Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    if not adapters:
        return None
    excluded, known = frozenset(ungated), [adapter.name for adapter in adapters]
    for name in sorted(excluded):
        if name not in known:
            raise ModelError(f"ungated: {name!r} has no adapter; the network's adapters are in {known}")
    layers, shapes = [], {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    for adapter in adapters:
        trained = adapter.down in shapes and adapter.up in shapes
        alone = trained and all(uses[id(model.get_parameter(name))] == 1 for name in (adapter.down, adapter.up))
        if alone and adapter.name not in excluded:
            rank = shapes[adapter.down][0]
            layers.append(Layer(adapter.name, rank, (adapter.down,), "linear", columns=(adapter.up,)))
    if not layers:
        raise ModelError("every adapter is frozen, shared or excluded from gating, so there are no components to gate")
    return Structure(tuple(layers), (), shapes, (), (), {})
