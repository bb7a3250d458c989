"""Golomb–Rice codes: mostly small whole numbers in fewer bits, with a length that is known without encoding.

A tensor's codes c form a table with one row per unit. Rows whose scale is zero are not written. If it pays, one bit per
column marks the columns that are not zero (a unit that stayed silent all round moves no weight that reads it), and only
those are written. Each remaining code is written as the lowest k bits of |c|, the rest |c| >> k in unary, and a sign
unless c = 0. One byte before the table holds the best k and whether columns are marked. With the largest k a code has
its full width, so a table never costs more than that byte.

Bits are written plane by plane: the lowest bit of every code, the next bit of every code, … then "is there more?" for
every code, for every code that had more, …, then signs. Neither end then needs a loop over codes. And unlike a deflate
or zstd stream, the length is a sum over codes, which a GPU computes without copying any to the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprior.core.errors import WireError

Bits = NDArray[np.uint8]
Flags = NDArray[np.bool_]
MARKED = 8
"""The flag in a table's first byte, next to k: columns are marked."""


def encode(codes: NDArray[np.int8], written: Flags, levels: int) -> bytes:
    """Encode a table. `written` marks the codes that the receiver expects; the others must be zero."""
    size = np.abs(codes)
    cost = np.array([np.minimum(size >> k, (levels >> k) - 1).sum(dtype=np.int64) for k in range(_widths(levels))])
    columns: Flags = np.any(written, 0)
    moved: Flags = np.any(size, 0)
    every, some = (count * np.arange(1, len(cost) + 1) + cost for count in (written.sum(), (written & moved).sum()))
    marked = some.min() + columns.sum() < every.min()
    k = int((some if marked else every).argmin())
    size, codes = (part[written & moved if marked else written] for part in (size, codes))
    planes: list[NDArray[Any]] = [moved[columns]] if marked else []
    planes += [(size >> bit) & 1 for bit in range(k)]
    rest = size >> k
    for step in range(1, (levels >> k) + 1):
        planes.append(rest >= step)
        rest = rest[planes[-1]]
    planes.append(codes[size > 0] < 0)
    bits = np.concatenate([plane.astype(np.uint8, copy=False) for plane in planes])
    return bytes([k + MARKED * bool(marked)]) + np.packbits(bits).tobytes()


def decode(
    data: memoryview, rows: Flags, columns: int, mask: Flags | None, levels: int
) -> tuple[NDArray[np.int8], memoryview]:
    """Decode a table; also return the rest. Codes are expected in these rows and, if given, in this mask.

    Nothing is allocated for codes before it is clear that the message holds at least one bit for each.
    """
    if not len(data) or data[0] & ~(7 | MARKED) or data[0] & 7 >= _widths(levels):
        raise WireError("message ends inside its codes")
    k, marked, reader = data[0] & 7, data[0] & MARKED, _Reader(data[1:])
    live = int(rows.sum())
    if mask is None:
        moved = reader.take(columns if live else 0).view(bool) if marked else None
        count = live * (columns if moved is None else int(moved.sum()))
        reader.check((k + 1) * count)
        place = rows[:, None] & (np.ones(columns, bool) if moved is None or not live else moved)
    else:
        place = mask & rows[:, None]
        if marked:
            sent: Flags = np.any(place, 0)
            sent[sent] = reader.take(int(sent.sum())).view(bool)
            place &= sent
        count = int(place.sum())
        reader.check((k + 1) * count)
    codes = np.zeros(place.shape, np.int8)
    codes[place] = _read(reader, count, k, levels)
    return codes, reader.rest()


def _read(reader: "_Reader", count: int, k: int, levels: int) -> NDArray[np.int8]:
    """Read `count` codes, plane by plane."""
    low, high = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    for bit in range(k):
        low |= reader.take(count) << bit
    more = np.arange(count)
    for _ in range(levels >> k):
        more = more[reader.take(len(more)).view(bool)]
        high[more] += 1
    size = (high << k) | low
    if (size > levels).any():
        raise WireError("message holds codes that are out of range")
    codes = size.astype(np.int8)
    moved = np.flatnonzero(codes)
    codes[moved] *= 1 - 2 * reader.take(len(moved)).view(np.int8)
    return codes


def count_bytes(tables: Sequence[tuple[Tensor, Tensor, Tensor | None]], levels: int) -> Tensor:
    """The sum of `len(encode(…))` over tables (codes, rows, mask). Codes are written in these rows and, if there is a
    mask, only where it is set."""
    joint = torch.cat([codes.reshape(-1) for codes, _, _ in tables]).abs()
    sizes = [codes.numel() for codes, _, _ in tables]
    costs = [_sums((joint >> k).clamp(max=(levels >> k) - 1), sizes) for k in range(_widths(levels))]
    rest, nonzero = torch.stack(costs, -1), _sums(joint > 0, sizes)
    every, some, columns = (torch.stack(parts) for parts in zip(*(_expected(*table) for table in tables), strict=True))
    each = torch.arange(1, len(costs) + 1, device=joint.device)
    unmarked = (every[:, None] * each + rest).amin(1)
    marked = (some[:, None] * each + rest).amin(1) + columns
    return (1 + (torch.minimum(unmarked, marked) + nonzero + 7) // 8).sum()


def _sums(joint: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack([piece.sum(dtype=torch.int64) for piece in joint.split(sizes)])


def _expected(codes: Tensor, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """How many codes are written without marks, how many with marks, and how many columns can be marked."""
    moved, live = codes.any(0), rows.sum()
    if mask is None:
        return live * codes.shape[1], live * moved.sum(), (live > 0) * codes.shape[1]
    written = mask & rows[:, None]
    return written.sum(), (written & moved).sum(), written.any(0).sum()


def _widths(levels: int) -> int:
    """How many values k can take: with the last one, a code has its full width."""
    return levels.bit_length()


class _Reader:
    """Reads bits from the front of some bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.place = data, 0

    def check(self, count: int) -> None:
        """Check that `count` bits are left."""
        if self.place + count > 8 * len(self.data):
            raise WireError("message ends inside its codes")

    def take(self, count: int) -> Bits:
        """Take the next `count` bits, each in a byte of its own."""
        self.check(count)
        first, last, skip = self.place // 8, (self.place + count + 7) // 8, self.place % 8
        self.place += count
        return np.unpackbits(np.frombuffer(self.data[first:last], np.uint8))[skip : skip + count]

    def rest(self) -> memoryview:
        """The rest, from the next whole byte."""
        if self.take(-self.place % 8).any():
            raise WireError("message has bits after its codes")
        return self.data[self.place // 8 :]
