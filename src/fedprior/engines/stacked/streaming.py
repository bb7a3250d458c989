"""Data larger than the device: they stay on the host, and each round copies its cohort's examples.

They are gathered into pinned memory and copied without waiting, with one block of places per client, so that a captured
graph finds other cohorts in the same memory.
"""

import torch
from torch import Tensor

from fedprior.core.federated import FederatedData
from fedprior.core.inputs import ModelInputs, Several
from fedprior.core.trees import Params, Tree
from fedprior.engines.batches import Places


def cohort_examples(pairs: list[tuple[FederatedData, int]], train: int, test: int, device: torch.device) -> Tree:
    """The training and test examples of some clients on the device, with `train` and `test` places per client."""
    data = pairs[0][0]
    own = [own.train[client] for own, client in pairs], [own.test[client] for own, client in pairs]
    return {
        "train": _gather({**_named(data.x), "y": data.y}, own[0], train, device),
        "test": _gather({**_named(data.test_x), "y": data.test_y}, own[1], test, device),
    }


def _named(inputs: ModelInputs) -> Params:
    """Inputs as tensors by name, of which none is called y."""
    return {f"x/{name}": part for name, part in inputs.parts.items()} if isinstance(inputs, Several) else {"x": inputs}


def places(examples: Params, size: Tensor) -> tuple[ModelInputs, Tensor, Places]:
    """Inputs, targets, and the places of each client's own."""
    several = {name.removeprefix("x/"): part for name, part in examples.items() if name.startswith("x/")}
    x, y = Several(several) if several else examples["x"], examples["y"]
    start = torch.arange(len(size), device=size.device) * (len(y) // len(size))
    return x, y, Places(torch.arange(len(y), device=size.device), start, size)


def _gather(values: Params, own: list[Tensor], capacity: int, device: torch.device) -> Params:
    """Rows of some arrays, client after client; further places repeat a client's last row."""
    rows = torch.cat([_padded(mine, capacity) for mine in own])
    pin = device.type == "cuda"
    out = {}
    for name, value in values.items():
        block = torch.empty(len(rows), *value.shape[1:], dtype=value.dtype, pin_memory=pin)
        torch.index_select(value, 0, rows, out=block)
        out[name] = block.to(device, non_blocking=True)
    return out


def _padded(rows: Tensor, capacity: int) -> Tensor:
    if not len(rows):  # a client without test examples: any row will do, because it is never read
        return rows.new_zeros(capacity)
    return rows[torch.arange(capacity).clamp(max=len(rows) - 1)]
