"""Several processes as one: `torchrun` starts them, each trains its share of a cohort, all see all the uploads.

Every rank chooses the same cohort and makes the same packets, from the same keys. It trains its own clients, gathers
what the others' left behind, and takes the same M-step. Only the first rank writes and prints.
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
    """How many ranks there are; 1 where nobody has started several."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which one this is."""
    return dist.get_rank() if count() > 1 else 0


def first() -> bool:
    """Whether this is the one that writes and prints."""
    return rank() == 0


def gpu() -> torch.device:
    """This rank's GPU: one each on a machine."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if count() > 1 else torch.device("cuda")


@contextmanager
def joined() -> Iterator[None]:
    """Join the ranks that `torchrun` has started; alone, do nothing."""
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
    """The places in a cohort of this rank's clients. All ranks have as many, so that they can gather in one call:
    where the cohort does not divide, the last client is trained more than once and counted once.

    >>> share(3)
    [0, 1, 2]
    """
    each = -(-clients // count())
    return [min(rank() * each + i, clients - 1) for i in range(each)]


def own(tree: Nest, clients: int) -> Nest:
    """This rank's rows of what is stacked by client; alone, everything as it is."""
    if count() == 1:
        return tree
    places = torch.tensor(share(clients))
    return trees.tree_map(lambda leaf: leaf[places.to(leaf.device)], tree)


def gather(tree: Nest, clients: int) -> Nest:
    """From every rank's share to the whole cohort, stacked by client, on every rank."""
    if count() == 1:
        return tree
    return trees.tree_map(lambda leaf: _gather(leaf)[:clients], tree)


def _gather(rows: Tensor) -> Tensor:
    # Channels-last tensors would be gathered as they lie in memory; a bool has no NCCL type, a bfloat16 none of gloo's.
    plain = rows.detach().contiguous()
    plain = plain.view(torch.uint8) if rows.dtype in (torch.bool, torch.bfloat16) else plain
    parts = [torch.empty_like(plain) for _ in range(count())]
    dist.all_gather(parts, plain)
    return torch.cat(parts).view(rows.dtype)
