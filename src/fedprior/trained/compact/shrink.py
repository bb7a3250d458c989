"""Make a physically smaller network: remove units that are zero, and everything that reads them.

A unit is closed if its row of the weight, its bias and its norm's affine pair are exactly zero, whatever the reason.
This therefore needs only a network, not a prior. Six rules keep the result exact and small:

- Channels that are added (a residual connection) must stay the same channels. One is removed only if every layer that
  adds to it has closed it; otherwise the row of zeros stays.
- A norm's statistics count the zeros of a closed unit: see `PrunedNorm`.
- A batch norm is folded into the layer that it directly follows.
- A weight that is used in two places is stored once, which saves more than its closed units would: it stays as it is.
- A linear layer may read only some of the columns that a flattened channel feeds (gates on inputs): it selects them.
- The smaller network is run and compared with the original before it is returned.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from fedprior.core.ensemble import Ensemble
from fedprior.core.errors import ModelError
from fedprior.trained.compact.fold import fold
from fedprior.trained.compact.layers import read_columns, shrink_layer, smaller_norm
from fedprior.trained.compact.moves import channels_left, shrink_move
from fedprior.trained.compact.spelled_out import spelled_out
from fedprior.units.edges import Edge
from fedprior.units.structure import Layer
from fedprior.units.torch_operations import CONVOLUTIONS, NORMS, name_of
from fedprior.units.trace import Edges, find_edges

TOLERANCE = 1e-5
"""How far an output may be off, relative to the largest. Sums run in a different order, so they round differently."""


@dataclass(frozen=True)
class Compact:
    """A network without its closed units."""

    module: nn.Module
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each layer that lost units: how many are left, out of how many."""
    note: str = ""
    """Why some closed units are still there, if any are."""


def compact(module: nn.Module, example: Tensor, *, align: int = 1) -> Compact:
    """Remove the closed units of a network, for inputs shaped like `example` (one input, without a batch dimension).

    Outputs do not change. A network that cannot be analysed is returned whole, with a note that says why. With `align`,
    the number of channels that a convolution reads stays a multiple of it, by keeping units of zeros: CPUs process
    channels in blocks, and 29 channels can take longer than 32.
    """
    if isinstance(module, Ensemble):
        members = [compact(member, example, align=align) for member in module.members]
        units = {f"members.{k}.{name}": count for k, m in enumerate(members) for name, count in m.units.items()}
        return Compact(Ensemble([m.module for m in members]).eval(), units, members[0].note)
    module = copy.deepcopy(module).eval()
    try:
        whole, module = module, spelled_out(module, example)
    except ModelError:
        whole = module
    pruned = {name for name, layer in _layers(module) if _zero_rows([layer.weight, layer.bias]).any()}
    unread = {name for name, layer in _layers(module) if isinstance(layer, nn.Linear) and not read_columns(layer).all()}
    if not pruned | unread:
        return Compact(_folded(whole, example))
    try:
        shared = _with_shared_weights(module)
        found = find_edges(module, example, ungated={n for n, _ in _layers(module) if n not in pruned or n in shared})
        open_ = {name: ~_closed(module, layer) for name, layer in found.layers.items()}
        left = _channels_left(found, open_, align, shared)
        if fixed := found.layers.keys() - left.keys():
            raise ModelError(f"torch's module around {min(fixed)!r} has a fixed number of heads and neurons")
        small, units = _remove(found, left, shared)
        _check_equal(whole, small, example)
    except ModelError as error:
        return Compact(_folded(whole, example), {}, f"no unit was removed: {error}")
    stay = sum(int((left[name] & ~open_[name]).sum()) for name in left if open_[name].any())
    added = "closed units stay as zeros: their channels are added to some that are open"
    added += ", or read by a weight that is used in two places" if shared else ""
    return Compact(_folded(small, example), units, f"{stay:,} {added}" if stay and align == 1 else "")


def _folded(module: nn.Module, example: Tensor) -> nn.Module:
    """Fold batch norms into their layers where possible, if that does not change the outputs."""
    try:
        folded = fold(module)
        _check_equal(module, folded, example)
    except ModelError:
        return module
    return folded


def _layers(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name, m) for name, m in module.named_modules() if isinstance(m, (*CONVOLUTIONS, nn.Linear)))


def _with_shared_weights(module: nn.Module) -> set[str]:
    """Modules that share a parameter with another."""
    uses = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return {name for name, m in module.named_modules() if any(uses[id(p)] > 1 for p in m.parameters(recurse=False))}


def _zero_rows(parameters: Iterable[Tensor | nn.Module | None]) -> Tensor:
    """Which rows are zero in all of them."""
    zero = [(p == 0).flatten(1).all(1) if p.dim() > 1 else p == 0 for p in parameters if isinstance(p, Tensor)]
    return torch.stack(zero).all(0)


def _closed(module: nn.Module, layer: Layer) -> Tensor:
    """Which units of a layer are zero in all of its parameters."""
    values = [module.get_parameter(name) for name in layer.parameters]
    if layer.blocks:
        blocks = zip(values, layer.blocks, strict=True)
        values = [p.unflatten(0, (-1, layer.size, block)).transpose(0, 1).flatten(1) for p, block in blocks]
    return _zero_rows(values)


def _remove(
    found: Edges, left: dict[str, Tensor], shared: set[str]
) -> tuple[fx.GraphModule, dict[str, tuple[int, int]]]:
    """Shrink the traced copy, operation by operation."""
    selected: dict[str, tuple[int, int]] = {}
    for node in list(found.graph.graph.nodes):
        inputs = [found.edges[n] for n in node.all_input_nodes if found.shapes[n] is not None]
        columns = channels_left(found, inputs[0], left) if inputs else None
        if node.op == "call_module":
            name = str(node.target)
            own = found.edges[node]
            rows = channels_left(found, own, left) if own.sources == {name} else None
            _shrink_module(found, node, rows, columns)
            selected |= _select_inputs(found, node) if name not in shared else {}
        elif columns is not None and _flattens(found, node, inputs[0]):
            # Its sizes may be literal numbers.
            _replace_reshape(found, node)
        elif node.op != "output" and found.edges[node].sources:
            shrink_move(found, node, left)
    found.graph.graph.lint()
    found.graph.recompile()
    lost = [name for name in found.layers if not bool(left[name].all())]
    return found.graph, {name: (int(left[name].sum()), len(left[name])) for name in lost} | selected


def _channels_left(found: Edges, open_: dict[str, Tensor], align: int, shared: set[str]) -> dict[str, Tensor]:
    """Which channels of every gated layer stay. Layers that are added to each other keep the same ones."""
    together: list[set[str]] = []
    every = {frozenset(map(found.origin, edge.sources)) for edge in found.edges.values() if edge.sources}
    for sources in every:
        joined = {*sources}.union(*(group for group in together if group & sources))
        together = [group for group in together if not group & sources] + [joined]
    left: dict[str, Tensor] = {}
    fixed = _added_to_others(found).union(
        *(
            found.edges[n].sources
            for node in found.graph.graph.nodes
            if node.target in shared
            for n in node.all_input_nodes
        )
    )
    for group in together:
        sizes = {len(open_[name]) for name in group}
        # If one channel is added to many, or read by a weight that must not change, all stay.
        bound = len(sizes) > 1 or bool(group & set(map(found.origin, fixed)))
        keep = None if bound else torch.stack([open_[name] for name in group]).any(0)
        if keep is not None:
            step = align if _feeds_convolution(found, group) else 1
            few = max(1, -(-int(keep.sum()) // step) * step) - int(keep.sum())
            keep[(~keep).nonzero()[:few]] = True
        left |= {name: torch.ones_like(open_[name]) if keep is None else keep for name in group}
    return left


def _added_to_others(found: Edges) -> set[str]:
    """Layers whose channels are added to channels that always stay: the input's, or those of a fully open layer."""
    fixed: set[str] = set()
    for node in found.graph.graph.nodes:
        if node.op in ("call_function", "call_method") and found.shapes[node] and not found.edges[node].sources:
            fixed = fixed.union(*(found.edges[n].sources for n in node.all_input_nodes))
    return fixed


def _feeds_convolution(found: Edges, group: set[str]) -> bool:
    """Whether a convolution reads any of these layers."""
    return any(
        node.op == "call_module"
        and isinstance(found.graph.get_submodule(str(node.target)), CONVOLUTIONS)
        and any(found.edges[n].sources & group for n in node.all_input_nodes)
        for node in found.graph.graph.nodes
    )


def _flattens(found: Edges, node: fx.Node, edge: Edge) -> bool:
    """Whether a reshape joins all dimensions but the first, or changes nothing."""
    before, after = found.shapes[node.all_input_nodes[0]], found.shapes[node]
    if name_of(node.target) not in ("view", "reshape") or before is None or after is None or edge.axis != 1:
        return False
    return before == after or after == (before[0], math.prod(before[1:]))


def _shrink_module(found: Edges, node: fx.Node, rows: Tensor | None, columns: Tensor | None) -> None:
    name = str(node.target)
    module = found.graph.get_submodule(name)
    if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
        shrink_layer(name, module, rows, columns)
    elif columns is not None and isinstance(module, NORMS):
        parent, _, last = name.rpartition(".")
        axis = found.edges[node].axis
        setattr(found.graph.get_submodule(parent), last, smaller_norm(module, columns, axis))
    elif columns is not None and isinstance(module, nn.PReLU) and module.weight.numel() > 1:
        module.weight = nn.Parameter(module.weight.detach()[columns])
        module.num_parameters = module.weight.numel()


def _select_inputs(found: Edges, node: fx.Node) -> dict[str, tuple[int, int]]:
    """Let a linear layer read only the inputs that it has weights for, if that saves more than the indices cost."""
    name = str(node.target)
    layer = found.graph.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        return {}
    read = read_columns(layer)
    kept, of = max(1, int(read.sum())), len(read)
    if (of - kept) * layer.out_features * layer.weight.element_size() <= kept * 8:
        return {}
    read[: 1 if not read.any() else 0] = True
    chosen = f"{name.replace('.', '_')}_inputs"
    found.graph.register_buffer(chosen, read.nonzero().flatten())
    shrink_layer(name, layer, None, read)
    graph, (source,) = found.graph.graph, node.all_input_nodes
    with graph.inserting_before(node):
        node.replace_input_with(source, graph.call_function(torch.index_select, (source, -1, graph.get_attr(chosen))))
    return {f"{name}'s inputs": (kept, of)}


def _replace_reshape(found: Edges, node: fx.Node) -> None:
    source = next(n for n in node.all_input_nodes if found.shapes[n] is not None)
    graph = found.graph.graph
    with graph.inserting_before(node):
        same = found.shapes[source] == found.shapes[node]
        new = source if same else graph.call_function(torch.flatten, (source, 1))
    found.edges[new], found.shapes[new] = found.edges[node], found.shapes[node]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _check_equal(module: nn.Module, small: nn.Module, example: Tensor) -> None:
    """Compare on the example and on noise of its scale: an operation may depend on sizes in ways the walk misses."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn((4, *example.shape), generator=draw).to(example)
    x = torch.cat([example.unsqueeze(0), noise]) if example.is_floating_point() else example.unsqueeze(0)
    try:
        difference = largest_difference(module, small, x)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"without its closed units the network does not run ({error})") from error
    if not difference <= TOLERANCE:
        raise ModelError(f"without its closed units the network's outputs differ by {difference:.1e}")


def largest_difference(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    """How far two networks' outputs are apart, relative to the largest output (or to 1, if all are smaller)."""
    with torch.no_grad():
        a, b = _flat(one(x)), _flat(other(x))
    return float((a - b).abs().max() / a.abs().max().clamp(min=1))


def _flat(outputs: Tensor | Iterable[Tensor]) -> Tensor:
    return outputs.flatten() if isinstance(outputs, Tensor) else torch.cat([_flat(part) for part in outputs])
