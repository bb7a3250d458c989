"""Low-rank adapters: a frozen network and, beside each chosen linear layer, a trained product B A of small rank.

    y = W x + b + (α / r) B A x,   A: r × inputs,   B: outputs × r

Row i of A and column i of B are the adapter's i-th *component*, a matrix of rank one. A starts at random and B at zero,
so that the adapted network starts as the network that it adapts (Hu et al. 2021, LoRA).
"""

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedprior.core.errors import ModelError, SettingError, described


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        like: dict[str, Any] = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scale = alpha / rank
        edge = base.in_features**-0.5
        draw = torch.rand(self.down.weight.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            self.down.weight.copy_((2 * draw - 1) * edge)
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs plus the adapter's."""
        y: Tensor = self.base(x) + self.up(self.down(self.dropout(x))) * self.scale
        return y

    def merged(self) -> nn.Linear:
        """One linear layer with the same outputs."""
        whole = copy.deepcopy(self.base)
        with torch.no_grad():
            whole.weight += self.scale * self.up.weight @ self.down.weight
        return whole


class Adapter(NamedTuple):
    """Where an adapter is in a network."""

    name: str
    """The module that has it."""
    down: str
    """The parameter A, whose rows are components."""
    up: str
    """The parameter B, whose columns are."""


def adapt(
    module: nn.Module,
    rank: int = 16,
    targets: str | Iterable[str] | None = None,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    train: str | Iterable[str] = (),
    seed: int = 0,
) -> nn.Module:
    """A copy of a network that is frozen and has an adapter of this rank beside each of its linear layers.

    `targets` chooses the layers by name (`encoder.0.query`), by the end of a name (`query`) or by a pattern
    (`encoder.*.query`); without it, all are adapted. A layer with fewer inputs or outputs than `rank` has an adapter of
    that smaller rank. `alpha / rank` scales what an adapter adds; `alpha` is the rank unless you say otherwise. `train`
    names modules that are trained in full, such as a new head. `seed` draws the first factors.

    The copy shares the memory of the frozen weights with `module`, which does not change.
    """
    _check(module, rank, alpha, dropout)
    heads = _named(module, train)
    linear = {name: part for name, part in module.named_modules() if _adaptable(name, part, heads)}
    chosen = _chosen(module, linear, targets)
    whole = _frozen_copy(module, heads)
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        base = whole.get_submodule(name)
        assert isinstance(base, nn.Linear)
        least = min(rank, base.in_features, base.out_features)
        beside = Adapted(base, least, least if alpha is None else alpha * least / rank, dropout, generator)
        whole = _replaced(whole, name, beside)
    _leave_fast_paths(whole)
    return whole


def _check(module: Any, rank: int, alpha: float | None, dropout: float) -> None:
    if not isinstance(module, nn.Module):
        raise ModelError(f"only a torch.nn.Module can be adapted, not {described(module)}")
    if find_adapters(module):
        raise ModelError("the network has adapters already; adapt the one that it was made from")
    if not isinstance(rank, int) or rank < 1:
        raise SettingError(f"rank must be a whole number of at least 1, got {rank!r}")
    if alpha is not None and not alpha > 0:
        raise SettingError(f"alpha must be above 0, got {alpha}")
    if not 0 <= dropout < 1:
        raise SettingError(f"dropout must be at least 0 and below 1, got {dropout}")


def _named(module: nn.Module, train: str | Iterable[str]) -> tuple[str, ...]:
    """The modules to be trained in full."""
    names = (train,) if isinstance(train, str) else tuple(train)
    known = dict(module.named_modules())
    for name in names:
        if not name or name not in known:
            raise ModelError(f"train: the network has no module {name!r}; its parts are {_listed(known)}")
    return names


def _adaptable(name: str, part: nn.Module, heads: Sequence[str]) -> bool:
    # nn.MultiheadAttention reads the weight of this kind of layer and never calls it.
    linear = isinstance(part, nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
    return linear and not any(_within(name, head) for head in heads)


def _within(name: str, head: str) -> bool:
    return name == head or name.startswith(f"{head}.")


def _chosen(module: nn.Module, linear: dict[str, nn.Module], targets: str | Iterable[str] | None) -> list[str]:
    """The layers that these targets name, in the network's order."""
    if not linear:
        raise ModelError("the network has no linear layer to adapt; adapters are for nn.Linear")
    if targets is None:
        return list(linear)
    wanted = (targets,) if isinstance(targets, str) else tuple(targets)
    if not wanted:
        raise SettingError("targets is empty, so nothing would be adapted; leave it out to adapt all linear layers")
    found = {target: [name for name in linear if _matches(name, target)] for target in wanted}
    for target, names in found.items():
        if names:
            continue
        hidden = any(_matches(name, target) for name, _ in module.named_modules())
        why = "is no linear layer that the network calls" if hidden else "names no layer"
        raise ModelError(f"targets: {target!r} {why}; there are {_listed(linear)}")
    return [name for name in linear if any(name in names for names in found.values())]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or fnmatch(name, target)


def _listed(names: Iterable[str], most: int = 12) -> str:
    every = [name for name in names if name]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _frozen_copy(module: nn.Module, heads: Sequence[str]) -> nn.Module:
    """A copy whose frozen parameters share their memory with the original's; those of the heads are its own."""
    free = {id(p) for head in heads for p in module.get_submodule(head).parameters()}
    memo = {
        id(p): nn.Parameter(p.detach().clone() if id(p) in free else p.detach(), requires_grad=id(p) in free)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo)


def _replaced(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """The module with another part in that place, which is the whole if it has no name."""
    if not name:
        return part
    module.set_submodule(name, part)
    return module


def _leave_fast_paths(module: nn.Module) -> None:
    """In evaluation, torch's transformer layers read the weights of their linear layers instead of calling them."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False


# ---------------------------------------------------------------------- in a network
def find_adapters(module: nn.Module) -> tuple[Adapter, ...]:
    """The adapters of a network: ours, and those that the `peft` library has put around linear layers."""
    found = []
    for name, part in module.named_modules():
        within = f"{name}." if name else ""
        if isinstance(part, Adapted):
            found.append(Adapter(name, f"{within}down.weight", f"{within}up.weight"))
        elif _of_peft(part):
            factors = part.lora_A.items()
            found += [
                Adapter(f"{within}{key}", f"{within}lora_A.{key}.weight", f"{within}lora_B.{key}.weight")
                for key, factor in factors
                if isinstance(factor, nn.Linear) and factor.weight.requires_grad
            ]
    return tuple(found)


def _of_peft(part: Any) -> bool:
    return isinstance(getattr(part, "lora_A", None), nn.ModuleDict) and hasattr(part, "base_layer")


def merged(module: nn.Module) -> nn.Module:
    """A copy in which every adapter is part of the weight of its layer, if there are any."""
    if not find_adapters(module):
        return module
    whole = copy.deepcopy(module)
    for name, part in list(whole.named_modules()):
        if isinstance(part, Adapted):
            whole = _replaced(whole, name, part.merged())
        elif _of_peft(part):
            part.merge()
            whole = _replaced(whole, name, part.get_base_layer())
    return whole
