"""Masks in less than one bit a gate: counts of ones by block, and which arrangement of a block it is.

A mask of n bits with k ones has an entropy of log₂ C(n, k) bits, which is less than n unless half are ones. It is cut
into blocks of 63 bits. A block with c ones is one of C(63, c), so its rank among them (in the order of their numbers,
Cover 1973) takes ⌈log₂ C(63, c)⌉ bits. How far c is from the count expected of a block, ⌊64 k/n⌋, is written as a
Golomb–Rice code (`rice.py`). One byte before that holds the expected count. For masks of independent bits this is
within two hundredths of a bit of the entropy, and unlike an arithmetic code's its length is a sum over blocks, which
a GPU computes without copying a mask to the host.
"""

from functools import cache
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprior.core.errors import WireError
from fedprior.units.positions import lasting
from fedprior.wire import rice

BLOCK = 63
"""Bits in a block: the most whose ranks fit in 64 bits."""
WIDTHS = [(comb(BLOCK, ones) - 1).bit_length() for ones in range(BLOCK + 1)]
"""Bits of a rank, by the number of ones."""
_CHOOSE = np.array([[comb(n, k) for k in range(BLOCK + 1)] for n in range(BLOCK + 1)], np.uint64)


@cache
def _widths_on(device: torch.device) -> Tensor:
    with lasting():
        return torch.tensor(WIDTHS, device=device)


def encode(mask: NDArray[np.bool_]) -> bytes:
    """Encode a mask of any shape."""
    blocks = _blocks(mask.reshape(-1))
    counts = blocks.sum(1)
    expected = _expected(int(counts.sum()), mask.size)
    away = (counts - expected).astype(np.int8)[None]
    written = np.ones(away.shape, np.bool_)
    return bytes([expected]) + rice.encode(away, written, BLOCK) + _write_ranks(_ranks(blocks), counts)


def decode(data: memoryview, size: int) -> tuple[NDArray[np.bool_], memoryview]:
    """Decode a mask of `size` bits; also return the rest."""
    if not len(data) or data[0] > BLOCK:
        raise WireError("message ends inside its masks")
    rows, columns = np.ones(1, np.bool_), -(-size // BLOCK)
    away, rest = rice.decode(data[1:], rows, columns, None, BLOCK)
    counts = away[0].astype(np.int64) + data[0]
    if (counts < 0).any() or (counts > BLOCK).any():
        raise WireError("message holds a mask that no block has")
    ranks, rest = _read_ranks(rest, counts)
    bits = _arranged(ranks, counts).reshape(-1)
    if bits[size:].any():
        raise WireError("message sets gates that the model does not have")
    return bits[:size], rest


def count_bytes(mask: Tensor) -> Tensor:
    """`len(encode(mask))` without encoding."""
    flat = (mask > 0).reshape(-1)
    padding = -len(flat) % BLOCK
    counts = torch.nn.functional.pad(flat, (0, padding)).reshape(-1, BLOCK).sum(1)
    away = (counts - _expected(counts.sum(), len(flat)))[None]
    ranks = _widths_on(flat.device)[counts].sum()
    return 1 + rice.count_bytes([(away, torch.ones_like(away[:, 0], dtype=torch.bool), None)], BLOCK) + (ranks + 7) // 8


def _expected(ones: "int | Tensor", size: int) -> "int | Tensor":
    """The likeliest count of a block."""
    return (64 * ones // max(size, 1)).clamp(max=BLOCK) if isinstance(ones, Tensor) else min(BLOCK, 64 * ones // size)


def _blocks(bits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.pad(bits, (0, -len(bits) % BLOCK)).reshape(-1, BLOCK)


def _ranks(blocks: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Each block's place among those with as many ones: Σ C(position, number of ones so far)."""
    ranks, seen = np.zeros(len(blocks), np.uint64), np.zeros(len(blocks), np.int64)
    for place, bits in enumerate(blocks.T):
        seen += bits
        ranks += np.where(bits, _CHOOSE[place, seen], np.uint64(0))
    return ranks


def _arranged(ranks: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The inverse: the block of each rank."""
    if (ranks >= _CHOOSE[BLOCK, counts]).any():
        raise WireError("message holds a mask that no block has")
    blocks, left, ranks = np.zeros((len(ranks), BLOCK), np.bool_), counts.copy(), ranks.copy()
    for place in reversed(range(BLOCK)):
        here = _CHOOSE[place, left]
        found = (left > 0) & (ranks >= here)
        blocks[:, place] = found
        ranks -= np.where(found, here, np.uint64(0))
        left -= found
    return blocks


def _write_ranks(ranks: NDArray[np.uint64], counts: NDArray[np.int64]) -> bytes:
    """Ranks in as many bits as their counts need, plane by plane."""
    widths = np.array(WIDTHS)[counts]
    planes = [(ranks[widths > bit] >> np.uint64(bit)) & np.uint64(1) for bit in range(max(WIDTHS))]
    return np.packbits(np.concatenate(planes).astype(np.uint8)).tobytes()


def _read_ranks(data: memoryview, counts: NDArray[np.int64]) -> tuple[NDArray[np.uint64], memoryview]:
    """The inverse; also return the rest."""
    widths = np.array(WIDTHS)[counts]
    size = (int(widths.sum()) + 7) // 8
    if len(data) < size:
        raise WireError("message ends inside its masks")
    bits, start = np.unpackbits(np.frombuffer(data[:size], np.uint8)).astype(np.uint64), 0
    ranks = np.zeros(len(counts), np.uint64)
    for bit in range(max(WIDTHS)):
        chosen = widths > bit
        end = start + int(chosen.sum())
        ranks[chosen] |= bits[start:end] << np.uint64(bit)
        start = end
    if bits[start:].any():
        raise WireError("message has bits after its masks")
    return ranks, data[size:]
