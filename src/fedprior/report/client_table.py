"""A table of every client at every evaluation: clients.bin, beside rounds.jsonl.

A line of JSON names the columns and the number of clients. Blocks of one size follow, one for each evaluation: the
round (8 bytes), four bytes for each number, column after column, and a CRC-32. A block that a crash cut short does not
count.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "fedprior-clients-1"
NAME = "clients.bin"


@dataclass(frozen=True)
class ClientTable:
    """What every evaluation found of every client; NaN where there is nothing."""

    columns: tuple[str, ...]
    """`loss` and, where there is one, `accuracy` of the model a client last sent; `server_…` of the server's."""
    rounds: np.ndarray
    values: np.ndarray
    """[evaluations, columns, clients]"""

    def last(self, column: str) -> np.ndarray:
        """A column at the last evaluation; empty if there is none."""
        empty = column not in self.columns or not len(self.rounds)
        return np.zeros(0) if empty else self.values[-1, self.columns.index(column)].astype(float)


def header(columns: Mapping[str, np.ndarray]) -> bytes:
    """How a file of these columns begins."""
    clients = len(next(iter(columns.values())))
    return (json.dumps({"format": FORMAT, "clients": clients, "columns": list(columns)}) + "\n").encode()


def block(number: int, columns: Mapping[str, np.ndarray]) -> bytes:
    """What an evaluation adds."""
    body = struct.pack("<q", number) + np.stack(list(columns.values())).astype("<f4").tobytes()
    return body + struct.pack("<I", zlib.crc32(body))


def read_clients(folder: Path) -> ClientTable | None:
    """What clients.bin says, if there is one; a `ValueError` if it is damaged."""
    path = folder / NAME
    if not path.is_file():
        return None
    head, found, rest = path.read_bytes().partition(b"\n")
    about = _about(head) if found else {}
    columns, clients = about.get("columns"), about.get("clients")
    if about.get("format") != FORMAT or not isinstance(columns, list) or not isinstance(clients, int) or clients < 1:
        raise ValueError(f"{NAME} is damaged: it does not say what is in it")
    size = 8 + 4 * clients * len(columns) + 4
    rounds: list[int] = []
    values: list[np.ndarray] = []
    for start in range(0, len(rest) - size + 1, size):
        body, check = rest[start : start + size - 4], rest[start + size - 4 : start + size]
        if struct.pack("<I", zlib.crc32(body)) != check:
            raise ValueError(f"{NAME} is damaged after evaluation {len(rounds)}")
        rounds.append(struct.unpack("<q", body[:8])[0])
        values.append(np.frombuffer(body, "<f4", offset=8).reshape(len(columns), clients))
    stacked = np.stack(values) if values else np.zeros((0, len(columns), clients), np.float32)
    return ClientTable(tuple(map(str, columns)), np.array(rounds, np.int64), stacked)


def _about(head: bytes) -> dict[str, Any]:
    """What the first line says, if it says anything."""
    try:
        about = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} is damaged: {error}") from error
    return about if isinstance(about, dict) else {}


def until(folder: Path, rounds: int) -> bytes:
    """The table without the evaluations after a round, as bytes; empty if nothing is left."""
    table = read_clients(folder)
    kept = [i for i, number in enumerate(table.rounds) if number <= rounds] if table else []
    if table is None or not kept:
        return b""
    rows = [dict(zip(table.columns, table.values[i], strict=True)) for i in kept]
    return header(rows[0]) + b"".join(block(int(table.rounds[i]), row) for i, row in zip(kept, rows, strict=True))
