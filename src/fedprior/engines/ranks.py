"""Several processes as one: `torchrun` starts them, each trains its share of a cohort, and all see all uploads.

Every rank chooses the same cohort and makes the same packets from the same keys. It trains its own clients, gathers the
results of the others, and takes the same M-step. Only the first rank writes and prints.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fedprior.core import trees
from fedprior.core.trees import Nest


def count() -> int:
    """The number of ranks, 1 unless several were started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank."""
    return dist.get_rank() if count() > 1 else 0


def first() -> bool:
    """Whether this is the rank that writes and prints."""
    return rank() == 0


def gpu() -> torch.device:
    """This rank's GPU; each rank on a machine has one."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if count() > 1 else torch.device("cuda")


@contextmanager
def joined() -> Iterator[None]:
    """Join the ranks that `torchrun` started; do nothing if there is only one."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or count() > 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def share(clients: int) -> list[int]:
    """The places of this rank's clients in a cohort. All ranks have the same number, so that they can gather in one
    call. If the cohort does not divide evenly, the last client is trained more than once and counted once.

    >>> share(3)
    [0, 1, 2]
    """
    each = -(-clients // count())
    return [min(rank() * each + i, clients - 1) for i in range(each)]


def own(tree: Nest, clients: int) -> Nest:
    """This rank's rows of a tree stacked by client; everything if there is only one rank."""
    if count() == 1:
        return tree
    places = torch.tensor(share(clients))
    return trees.tree_map(lambda leaf: leaf[places.to(leaf.device)], tree)


def gather(tree: Nest, clients: int) -> Nest:
    """Join every rank's share into the whole cohort, stacked by client, on every rank."""
    if count() == 1:
        return tree
    return trees.tree_map(lambda leaf: _gather(leaf)[:clients], tree)


def _gather(rows: Tensor) -> Tensor:
    # Channels-last tensors would be gathered in memory order. NCCL has no bool and gloo has no bfloat16.
    plain = rows.detach().contiguous()
    plain = plain.view(torch.uint8) if rows.dtype in (torch.bool, torch.bfloat16) else plain
    parts = [torch.empty_like(plain) for _ in range(count())]
    dist.all_gather(parts, plain)
    return torch.cat(parts).view(rows.dtype)
