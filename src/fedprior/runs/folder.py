"""A run's folder: config.toml, partition.json, rounds.jsonl, summary.json, and its model and checkpoint."""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fedprior.core import locks
from fedprior.core.errors import FullDiskError, RunError
from fedprior.core.files import append_bytes, append_line, write_atomically
from fedprior.core.storage import to_bytes
from fedprior.core.trees import Params
from fedprior.engines.server_state import Record
from fedprior.report import client_table, reading
from fedprior.report.jumps import CHECKPOINTS


class RunFolder:
    """The paths and formats of one run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.rounds = path / "rounds.jsonl"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.best = path / "best.safetensors"
        self.times = path / "times.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.checkpoints = path / CHECKPOINTS
        self.partition = path / "partition.json"
        self.diverged = path / "diverged.txt"
        self.clients = path / client_table.NAME

    def used(self) -> bool:
        """Whether the folder holds anything."""
        try:
            # Neither a lock nor half a config, left by a crash while the folder was created, counts.
            return self.path.exists() and (
                not self.path.is_dir()
                or any(entry.suffix != ".part" and entry.name != locks.NAME for entry in self.path.iterdir())
            )
        except OSError as error:
            raise RunError(f"cannot use {self.path}: {error.strerror}") from error

    def check_unused(self) -> None:
        """Refuse a folder that holds anything."""
        if self.used():
            raise RunError(f"{self.path} exists; {self._continue_or()}choose another folder (--out)")

    def _continue_or(self) -> str:
        """How to continue what a folder holds: a run, or several under it."""
        if self.config.exists():
            return f"continue it with `fedprior resume {self.path}`, or "
        runs = [config.parent for config in sorted(self.path.glob("*/config.toml"))]
        return f"it holds runs, each continued like `fedprior resume {runs[0]}`; or " if runs else ""

    def create(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the folder with its config."""
        self.check_unused()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, to_toml(config).encode())
            self.rounds.touch()
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """If the disk is full when a file of this run is written in the block, say how the run goes on."""
        try:
            yield
        except FullDiskError as error:
            if self.path.resolve() not in error.path.resolve().parents:
                raise
            where = "its last checkpoint, which is whole" if self.checkpoint.exists() else "its start"
            raise RunError(f"{error}, then `{self.again}` goes on from {where}") from error

    def read_config(self) -> dict[str, dict[str, Any]]:
        """Read the config, or raise an error that says why it cannot be read."""
        if not self.config.is_file():
            raise RunError(f"{self.path} is not a run: it has no config.toml")
        with self._reading():
            return reading.read_config(self.path)

    @property
    def deployed(self) -> str:
        """The name of a Flower run, which its devices know; empty for a simulation."""
        return str(self.read_config().get("flower", {}).get("run", ""))

    @property
    def again(self) -> str:
        """The command that continues this run."""
        if self.deployed:
            return f"flwr run . --run-config 'resume=\"{self.path.resolve()}\"'"
        return f"fedprior resume {self.path}"

    def extend(self, rounds: int) -> None:
        """Change the number of rounds in the config."""
        config = self.read_config()
        write_atomically(self.config, to_toml({**config, "run": {**config["run"], "rounds": rounds}}))

    def reopen(self) -> None:
        """Remove the traces of an earlier end: the run has more rounds now, or diverged with other settings."""
        for path in (self.summary, self.diverged):
            path.unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        """Append a round's record as one line."""
        append_line(self.rounds, json.dumps(without_nan(record)))

    def append_clients(self, number: int, columns: Mapping[str, Tensor]) -> None:
        """Append what the evaluation of a round found of every client."""
        rows = {name: values.numpy() for name, values in columns.items()}
        head = b"" if self.clients.exists() else client_table.header(rows)
        append_bytes(self.clients, head + client_table.block(number, rows))

    def append_time(self, number: int, seconds: float) -> None:
        """Store how long a round took, separately from its record, because records are the same on every machine."""
        append_line(self.times, json.dumps({"round": number, "seconds": round(seconds, 4)}))

    def records(self) -> list[Record]:
        """All complete lines. A line that a crash cut short is ignored."""
        with self._reading():
            return reading.read_rounds(self.path)

    def truncate(self, rounds: int, expected: str, *, write: bool = True) -> list[Record]:
        """Remove the records after the checkpoint, which expects this checksum of the records before it.

        With `write`, change the file as well; with several ranks, only one does.
        """
        records = self.records()[:rounds]
        if len(records) < rounds:
            raise RunError(f"{self.rounds} does not hold rounds 1 to {rounds} of its checkpoint")
        if checksum(records) != expected:
            raise RunError(f"{self.checkpoint} does not belong to the records in {self.rounds}")
        if write:
            text = "".join(json.dumps(record) + "\n" for record in records)
            write_atomically(self.rounds, text.encode())
            self._truncate_clients(rounds)
        return records

    def truncate_times(self, rounds: int) -> None:
        """Remove how long the rounds after this one took."""
        if self.times.exists():
            seconds = reading.round_seconds(self.path).items()
            lines = [json.dumps({"round": r, "seconds": took}) + "\n" for r, took in seconds if r <= rounds]
            write_atomically(self.times, "".join(lines))

    def _truncate_clients(self, rounds: int) -> None:
        """Remove what was found of clients after the checkpoint."""
        with self._reading():
            kept = client_table.until(self.path, rounds)
        if kept:
            write_atomically(self.clients, kept)
        else:
            self.clients.unlink(missing_ok=True)

    def read_summary(self) -> Record:
        """The summary of a finished run."""
        with self._reading():
            summary = reading.read_summary(self.path)
        if summary is None:
            raise RunError(f"{self.path} is not finished: it has no summary.json")
        return summary

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Report any failure in this block as a run that cannot be read."""
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise RunError(f"{self.path} cannot be read: {' '.join(str(error).split())}") from error

    def finish(self, summary: Record, model: Params) -> None:
        """Store the summary and the model of a finished run."""
        write_atomically(self.model, to_bytes(model))
        write_atomically(self.summary, (json.dumps(without_nan(summary), indent=2) + "\n").encode())


def checksum(records: list[Record]) -> str:
    """The CRC-32 of these records' lines, which ties a checkpoint to the records that led to it."""
    text = "".join(json.dumps(without_nan(record)) + "\n" for record in records)
    return str(zlib.crc32(text.encode()))


def without_nan(record: Record) -> Record:
    """Replace NaN, which JSON lacks, by null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def to_toml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables of plain values. JSON and TOML share numbers, booleans, lists and (but one character) strings."""
    tables = []
    for table, values in config.items():
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
            for key, value in values.items()
        ]
        tables.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(tables) + "\n"
