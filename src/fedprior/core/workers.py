"""Train clients in parallel on a CPU: one thread per client, one core per thread.

torch's own threads split each operation instead. The operations of a small client are too short for that, and on a
busy machine the threads spend their time waiting for each other. `--set workers=1` goes back to torch's threads:
compare the seconds of two runs.
"""

import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from fedprior.core.frozen import copied
from fedprior.core.network import Network

Item = TypeVar("Item")
Out = TypeVar("Out")


class Workers:
    """A pool of threads, each with its own copy of the network: a module can serve only one call at a time."""

    def __init__(self, network: Network, count: int) -> None:
        self.count = count
        self.networks: queue.SimpleQueue[Network] = queue.SimpleQueue()
        for _ in range(count):
            self.networks.put(replace(network, module=copied(network.module)))
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) if count > 1 else None

    @contextmanager
    def lend(self) -> Iterator[Network]:
        """A network for one call at a time."""
        network = self.networks.get()
        try:
            yield network
        finally:
            self.networks.put(network)

    @contextmanager
    def side_by_side(self) -> Iterator[Callable[[Callable[[Item], Out], Iterable[Item]], Iterable[Out]]]:
        """A `map` that runs as many calls side by side as there are workers: the built-in one, or the pool's."""
        if self.pool is None:
            yield map
        else:
            with one_core():
                yield self.pool.map

    def map(self, fn: Callable[[Network, Item], Out], items: Iterable[Item]) -> list[Out]:
        """Return `fn(network, item)` for every item, in order."""

        def call(item: Item) -> Out:
            with self.lend() as network:
                return fn(network, item)

        with self.side_by_side() as each:
            return list(each(call, items))


@contextmanager
def one_core() -> Iterator[None]:
    """Keep torch from splitting operations in this block; restore its setting afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
