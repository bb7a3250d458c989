"""The tensors of a round of several runs: inputs, outputs, and their way to the device and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior.core import trees
from fedprior.core.errors import SettingError
from fedprior.core.trees import Gates, Params, Tree
from fedprior.engines.batches import Extent, Places
from fedprior.priors import Prior


class Shape(NamedTuple):
    """What the host must know to make a round's tensors. Rounds of the same shape share a captured graph."""

    extent: Extent
    tests: int
    """Places for a client's test examples."""


class Inputs(NamedTuple):
    """What changes from round to round, besides the state."""

    clients: Tensor
    """[runs, cohort]: client numbers within each run."""
    round: Tensor
    """[runs]: the round's number."""
    memory: Tree
    """[runs · cohort, …]: what the correction remembers."""
    rates: Params
    """The factors of the learning rates, if a graph is captured and they are not constant; see `schedules.py`."""
    examples: Tree
    """[runs · cohort · places, …]: the cohort's examples, if data stay on the host; see `streaming.py`."""


class Numbers(NamedTuple):
    """What the host reads after a round, one row per run."""

    loss: Tensor
    up: Tensor
    down: Tensor
    fine_clients: Tensor
    fine_server: Tensor
    apart: Tensor
    """[runs, cohort]: how far away each upload was, as a multiple of the usual distance."""
    clip: Tensor
    """[runs, 1]: the clip of the round; empty if it is the same in all rounds."""
    disagreement: Tensor
    """Mean and maximum total variation; empty without gates."""
    floored: Tensor
    """One flag per layer."""
    scores: Tensor
    """[runs, cohort · measures]: sums over each client's test examples."""


class Outputs(NamedTuple):
    """Numbers for the records, and the clients' memories."""

    numbers: Numbers
    memory: Tree


@dataclass(frozen=True)
class Index:
    """The examples of all runs' clients: client c of run r is the `base[r] + c`-th."""

    rows: Tensor
    start: Tensor
    size: Tensor

    @classmethod
    def of(cls, shards: list[Any], device: torch.device) -> "Index":
        """Join the runs' shards. All their rows refer to the same array."""
        before = np.cumsum([0, *(len(shard.rows) for shard in shards[:-1])])
        start = np.concatenate([shard.offsets[:-1] + first for shard, first in zip(shards, before, strict=True)])
        size = np.concatenate([shard.sizes for shard in shards])
        rows = torch.cat([shard.rows for shard in shards]) if len(shards) > 1 else shards[0].rows
        return cls(rows, torch.from_numpy(start).to(device), torch.from_numpy(size).to(device))

    def places(self, clients: Tensor) -> Places:
        """The places of some clients."""
        return Places(self.rows, self.start[clients], self.size[clients])


class Captured:
    """A round as a CUDA graph. Replaying it costs one launch, however many kernels it holds."""

    def __init__(self, fn: Callable[[Inputs], Outputs], inputs: Inputs, pool: Any) -> None:
        self.inputs = trees.tree_map(Tensor.clone, inputs)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = fn(self.inputs)

    def __call__(self, inputs: Inputs) -> Outputs:
        trees.tree_map(Tensor.copy_, self.inputs, inputs)
        self.graph.replay()
        return self.outputs


def own_settings(priors: Sequence[Prior], like: Tensor) -> Params:
    """The scalars in which the priors of stacked runs differ, [runs] each: see `Prior.at`."""
    differing = [name for name in priors[0].scalars if len({getattr(prior, name) for prior in priors}) > 1]
    if differing and len({prior.per_client for prior in priors}) > 1:
        raise SettingError("runs that send all clients one packet cannot be stacked with runs that do not")
    return {name: like.new_tensor([getattr(prior, name) for prior in priors]) for name in differing}


def floor_flags(state: Tree, dims: int) -> Tensor:
    """[runs, layers]: where the floor acted, for any client if there are clients."""
    floored = list(state.get("floored", {}).values())
    if not floored:
        leaf = next(trees.leaves(state))[1]
        return torch.zeros(len(leaf), 1, device=leaf.device, dtype=torch.bool)
    flags = torch.stack(floored, -1) > 0
    return flags.any(1) if dims == 2 else flags


def mean_over(values: Tensor, counted: Tensor) -> Tensor:
    """[runs]: the mean over the clients that count, of [runs, cohort]; to the last bit the plain mean if all do."""
    left = torch.where(counted, values, 0.0).sum(1) / counted.sum(1)
    return torch.where(counted.all(1), values.mean(1), left)


def disagreement_of(client_gates: Gates, server_gates: Gates, counted: Tensor) -> Tensor:
    """[runs, 2]: mean and maximum of |π − θ| over gates and over the clients that count."""
    runs, cohort = counted.shape
    if not server_gates:
        return torch.zeros(runs, 0)
    both = [torch.cat([gates[layer].flatten(1) for layer in server_gates], 1) for gates in (client_gates, server_gates)]
    distances = (both[0] - both[1]).abs()
    distances = torch.where(counted.reshape(-1, 1), distances, 0.0).reshape(runs, -1)
    each = mean_over(distances.reshape(runs, cohort, -1).mean(2), counted)
    return torch.stack([torch.where(counted.all(1), distances.mean(1), each), distances.amax(1)], 1)


def to_host(numbers: Numbers) -> list[Tensor]:
    """Copy all numbers at once, the only time the host waits for the device."""
    parts = [part if part.dim() == 2 else part[:, None] for part in numbers]
    device = numbers.loss.device
    packed = torch.cat([part.to(device, torch.float64) for part in parts], 1).cpu()
    split = packed.split([part.shape[1] for part in parts], 1)
    return [
        (piece if part.dim() == 2 else piece[:, 0]).to(part.dtype) for piece, part in zip(split, numbers, strict=True)
    ]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
