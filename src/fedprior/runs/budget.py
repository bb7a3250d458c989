"""From bytes to a sparsity: find the sparsity with which an algorithm that takes a size stays within a budget."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedprior import wire
from fedprior.core import keys
from fedprior.core.errors import SettingError, counted
from fedprior.core.keys import Turn
from fedprior.core.network import Network
from fedprior.core.settings import Settings
from fedprior.core.trees import Gates
from fedprior.em import Algorithm, protocol
from fedprior.engines.build import applied
from fedprior.engines.unseen import Roll
from fedprior.priors import Narrow

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read_bytes(text: str) -> int:
    """Read a number of bytes with its unit.

    >>> read_bytes("5GiB"), read_bytes("1.5 MB")
    (5368709120, 1500000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]i?|Ki|)B\s*", text)
    if not match or match[2] not in UNITS:
        units = ", ".join(f"{unit}B" for unit in UNITS)
        raise SettingError(f"a budget is a number of bytes, such as 5GiB or 800MB, in {units}, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def sparsity_for(
    budget: int, build: Callable[[float], Algorithm], network: Network, settings: Settings, clients: int
) -> float:
    """The smallest sparsity with which a whole run sends no more than `budget` bytes, in both directions together.

    `build` makes the algorithm for a sparsity. Whole numbers are counted at full width: the entropy code, whose gain is
    known only afterwards, makes messages even shorter. `clients` is the number of all clients.
    """
    if run_bytes(build(0.0), network, settings, clients) <= budget:
        return 0.0
    low, most = 0.0, _prior(build(0.0)).most_sparse()
    high = most
    if (least := run_bytes(build(most), network, settings, clients)) > budget:
        raise SettingError(
            f"a budget of {budget:,} bytes is too small: the smallest possible network sends {least:,} in "
            f"{counted(settings.rounds, 'round')}; use fewer rounds or a coarser --wire"
        )
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if run_bytes(build(middle), network, settings, clients) <= budget else (middle, high)
    return min(most, math.ceil(1e4 * high) / 1e4)


def run_bytes(algorithm: Algorithm, network: Network, settings: Settings, clients: int) -> int:
    """The bytes that a run would send, counted round by round with the cohorts and gates that it will draw.

    `clients` is the number of all clients. Gates that are assigned before training are predicted exactly; those of
    later rounds, as if the weights or votes did not change. In a long schedule some rounds stand for those after them,
    which send less.
    """
    algorithm = applied(settings, algorithm)
    server, prior = algorithm.init(network.params(), network.statistics()), _prior(algorithm)
    layouts = [replace(layout, entropy=False) for layout in (algorithm.downlink(server), algorithm.uplink(server))]
    total, last, number = 0, -1, 1
    while number <= settings.rounds:
        server["age"]["rounds"].fill_(number - 1)
        server = prior.prune(server)
        size = prior.effective_parameters(server)
        done = prior.settled(number) and size == last
        rounds = range(number, settings.rounds + 1 if done else min(number + prior.stride, settings.rounds + 1))
        total += _bytes_of(prior, server["open"], layouts, settings, clients, rounds)
        last, number = size, rounds.stop
    return total


SAMPLE = 32
"""How many sub-networks are drawn to estimate the size of thousands."""


def _bytes_of(
    prior: Narrow, gates: Gates, layouts: list[wire.Layout], settings: Settings, clients: int, rounds: range
) -> int:
    """The bytes of all messages in these rounds, in which the server keeps these gates.

    For many sub-networks, use the mean of the first ones plus three standard errors, to be on the safe side.
    """

    def message(gates: Gates) -> Tensor:
        return torch.stack([wire.count_bytes({"gates": gates}, layout) for layout in layouts]).sum()

    count = settings.clients_per_round * len(rounds)
    if not prior.per_client:
        return int(message(gates)) * count
    root, drawn = keys.key(settings.seed), list[Tensor]()
    roll = Roll.of(root, clients, settings.unseen)
    for number in rounds[: math.ceil(SAMPLE / settings.clients_per_round)]:
        turn = Turn(root, number)
        cohort = roll.cohort(turn, settings.clients_per_round)
        drawn += protocol.broadcast_keys(prior, turn.of(torch.tensor(cohort)))
    each = torch.stack([message(prior.draw(gates, key)[0]) for key in drawn]).double()
    if len(each) == count:
        return int(each.sum())
    return math.ceil(count * float(each.mean() + 3 * each.std() / len(each) ** 0.5))


def _prior(algorithm: Algorithm) -> Narrow:
    """The prior, which must support a budget."""
    if not isinstance(algorithm.prior, Narrow):
        raise SettingError("only fednarrow and fedsparse-sized can be asked for a budget")
    return algorithm.prior
