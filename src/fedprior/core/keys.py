"""Randomness from counter-based keys.

A key is an int64 tensor. Every draw is a pure function of its key. A client therefore gets the same numbers alone, in
a vectorised cohort, on another device or after a resume, and a captured CUDA graph draws anew when its key tensor
changes. The mixing function is SplitMix64 (Steele, Lea and Flood 2014), whose 2^64 outputs are distinct.

>>> a = fold(key(0), 3)
>>> bool((uniform(a, (4,)) == uniform(a, (4,))).all())
True
"""

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fedprior.core.operations import operation

# SplitMix64's constants as signed integers, because torch multiplies int64 modulo 2^64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


class Purpose(IntEnum):
    """What a draw is for. It is the first branch below a run's key, so that no two purposes ever share a draw."""

    COHORT = 1
    BROADCAST = 2
    ADOPT = 3
    BATCHES = 4
    RELAX = 5
    DROPOUT = 6
    COMMIT = 7
    ATTACK = 8
    ROUNDING = 9
    COMPONENTS = 10
    NOISE = 11
    UNSEEN = 12
    POSTERIOR = 13


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _mix_number(number: int) -> int:
    """`_mix(number + γ)` in plain arithmetic, as a signed 64-bit number."""
    mask = 2**64 - 1
    x = (number + _GAMMA) & mask
    x = ((x ^ (x >> 30)) * (_MIX1 & mask)) & mask
    x = ((x ^ (x >> 27)) * (_MIX2 & mask)) & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """The root key of a run."""
    return _mix(torch.tensor(seed, dtype=torch.int64, device=device) + _GAMMA)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """Derive a key from a key and a number, elementwise: `fold(key, client_ids)` gives one key per client."""
    # We mix plain numbers on the host: a captured CUDA graph cannot copy them to the device.
    return mix_in(key, _mix_number(data) if isinstance(data, int) else data.to(key.device, torch.int64))


@operation
def mix_in(key: Tensor, data: Tensor | int) -> Tensor:
    """`fold` for numbers on the key's device, or for a plain number that has been mixed."""
    mixed = data if isinstance(data, int) else _mix(data + _GAMMA)
    # The key is mixed once more than the data. Otherwise fold(key(a), b) and fold(key(b), a) would be the same key.
    return _mix(_mix(key + _GAMMA) ^ mixed)


class Turn(NamedTuple):
    """Identifies the source of a draw: a run, one of its rounds and, if it concerns one client, that client.

    For several runs and clients at once, it holds tensors of one shape.

    >>> Turn(key(0), 1).of(7).key(Purpose.COMMIT) == fold(fold(fold(key(0), Purpose.COMMIT), 1), 7)
    tensor(True)
    """

    root: Tensor
    round: Tensor | int
    client: Tensor | int | None = None

    def of(self, client: Tensor | int) -> "Turn":
        """The turn of a client in this round."""
        return self._replace(client=client)

    def key(self, purpose: Purpose) -> Tensor:
        """Fold run → purpose → round → client; steps, epochs and tensors branch off below."""
        key = fold(fold(self.root, purpose), self.round)
        return key if self.client is None else fold(key, self.client)


@operation
def bits(key: Tensor, count: int) -> Tensor:
    """`count` distinct int64 numbers."""
    return _mix(key + torch.arange(1, count + 1, device=key.device) * _GAMMA)


@operation
def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers strictly between 0 and 1, with 23 random bits, so that both `log(u)` and `log(1 - u)` are finite."""
    count = math.prod(shape)
    return ((_shift(bits(key, count), 41).to(dtype) + 0.5) * 2.0**-23).reshape(shape)


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers in float64, by Box and Muller, from 53 random bits each."""
    count = math.prod(shape)
    first, second = ((_shift(bits(key, 2 * count), 11).double() + 0.5) * 2.0**-53).view(2, count)
    radius: Tensor = (-2 * first.log()).sqrt()
    found: Tensor = radius * (2 * math.pi * second).cos()
    return found.reshape(shape)


def each_with(key: Tensor, population: int, rate: float) -> list[int]:
    """Those of a population who are drawn when each is with this probability, apart from all others."""
    drawn = _shift(bits(key, population), 11) < round(rate * 2**53)
    return [int(one) for one in drawn.nonzero().flatten()]


@operation
def dropout(x: Tensor, key: Tensor, rate: float) -> Tensor:
    """x / (1 − rate) where a uniform draw is at least the rate, else zero."""
    return x * ((uniform(key, tuple(x.shape), x.dtype) >= rate).to(x.dtype) / (1 - rate))


def permutation(key: Tensor, size: Tensor | int, capacity: int) -> Tensor:
    """A random order of 0 … size−1 in the first `size` of `capacity` places; the rest is padding.

    The order does not depend on the capacity, so a padded client is shuffled as it would be alone.
    """
    order = bits(key, capacity)
    padding = torch.arange(capacity, device=key.device) >= size
    return torch.where(padding, torch.iinfo(torch.int64).max, order).argsort()


def choose(key: Tensor, population: int, count: int) -> list[int]:
    """Draw `count` of `population` without replacement, in time that does not grow with the population.

    This is Fisher–Yates with the untouched part of the array left implicit.
    """
    moved: dict[int, int] = {}
    chosen = []
    for i, draw in enumerate(bits(key, count).tolist()):
        j = i + draw % (population - i)
        chosen.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return chosen
