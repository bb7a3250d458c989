"""A cohort's E-step, vectorised or in turn: the same numbers up to rounding.

Measured: on a GPU vectorised is far faster; on a CPU clients in turn are, because grouped convolutions are slow there.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedprior import keys, trees
from fedprior.data import FederatedData
from fedprior.em import Algorithm, e_step
from fedprior.keys import Purpose
from fedprior.metrics import accuracy_count
from fedprior.network import Network
from fedprior.simulate.attack import Attack
from fedprior.simulate.batches import CohortBatches, Schedule, client_batches
from fedprior.trees import Params, Tree
from fedprior.workers import Workers

MODES = ("vectorised", "in-turn")


class CohortResult(NamedTuple):
    """A cohort's uploads and what is recorded of them, stacked by client."""

    uploads: Tree
    gates: dict[str, Tensor]
    loss: Tensor
    memory: Tree
    correct: Tensor
    """Of each client's own test examples, how many its hard assignment gets right."""


class Cohort(NamedTuple):
    """The clients of one round, and what each of them starts with, stacked by client."""

    clients: list[int]
    packets: Tree
    memory: Tree
    hostile: Tensor | None
    """Which clients attack; None: there are no attacks."""


def vectorised(
    algorithm: Algorithm,
    network: Network,
    data: FederatedData,
    cohort: Cohort,
    schedule: Schedule,
    key: Tensor,
    attack: Attack | None = None,
) -> CohortResult:
    """All clients at once: `torch.func.vmap` over a leading client dimension."""
    clients, packets = cohort.clients, cohort.packets
    client_keys = keys.fold(key, torch.tensor(clients, device=key.device))
    batches = CohortBatches(data, clients, schedule, keys.fold(client_keys, Purpose.BATCHES))
    tamper = partial(torch.func.vmap(attack), cohort.hostile) if attack else None
    step = e_step(algorithm, network, packets, batches, client_keys, cohort.memory, vectorised=True, tamper=tamper)
    params = torch.func.vmap(algorithm.prior.realise)(step.upload, packets)
    return CohortResult(*step, _correct_vectorised(network, data, clients, params))


def in_turn(
    algorithm: Algorithm,
    workers: Workers,
    data: FederatedData,
    cohort: Cohort,
    schedule: Schedule,
    key: Tensor,
    attack: Attack | None = None,
) -> CohortResult:
    """One client after another, on as many cores as there are workers."""

    def client_result(network: Network, position: int) -> CohortResult:
        client = cohort.clients[position]
        client_key = keys.fold(key, client)
        batches = client_batches(data, client, schedule, keys.fold(client_key, Purpose.BATCHES))
        packet, memory = trees.tree_map(_channels_last, trees.row((cohort.packets, cohort.memory), position))
        tamper = partial(attack, cohort.hostile[position]) if attack and cohort.hostile is not None else None
        step = e_step(algorithm, network, packet, batches, client_key, memory, tamper=tamper)
        rows = data.test[client]
        params = algorithm.prior.realise(step.upload, packet)
        return CohortResult(*step, accuracy_count(network, params, data.test_x[rows], data.test_y[rows]))

    results = workers.map(client_result, range(len(cohort.clients)))
    return CohortResult(*(trees.stack(parts) for parts in zip(*results, strict=True)))


def _channels_last(tensor: Tensor) -> Tensor:
    """The layout in which CPU convolutions are fastest; the numbers stay where they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _correct_vectorised(network: Network, data: FederatedData, clients: list[int], params: Params) -> Tensor:
    rows = torch.nn.utils.rnn.pad_sequence(
        [data.test[client] for client in clients], batch_first=True, padding_value=-1
    )
    if rows.shape[1] == 0 or not data.labelled:
        return torch.zeros(len(clients), dtype=torch.int64, device=rows.device)
    with torch.no_grad():
        outputs = torch.func.vmap(network.predict)(params, data.test_x[rows])
        return ((outputs.argmax(-1) == data.test_y[rows]) & (rows >= 0)).sum(1)
