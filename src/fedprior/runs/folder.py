"""A run's folder: config.toml, partition.json, rounds.jsonl, summary.json, and its model and checkpoint."""

import json
import math
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprior.core import locks
from fedprior.core.errors import RunError
from fedprior.core.files import append_line, write_atomically
from fedprior.core.storage import to_bytes
from fedprior.core.trees import Params

Record = dict[str, Any]


class RunFolder:
    """Paths and formats of one run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.rounds = path / "rounds.jsonl"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.best = path / "best.safetensors"
        self.times = path / "times.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.partition = path / "partition.json"
        self.diverged = path / "diverged.txt"

    def used(self) -> bool:
        """Whether there is anything here."""
        try:
            # A crash while the folder was made may have left half a config, which is nothing yet; nor is a lock.
            return self.path.exists() and (
                not self.path.is_dir()
                or any(entry.suffix != ".part" and entry.name != locks.NAME for entry in self.path.iterdir())
            )
        except OSError as error:
            raise RunError(f"cannot use {self.path}: {error.strerror}") from error

    def check_unused(self) -> None:
        """Refuse a folder that holds anything."""
        if self.used():
            hint = f"continue it with `fedprior resume {self.path}`, or choose" if self.config.exists() else "choose"
            raise RunError(f"{self.path} exists; {hint} another folder (--out)")

    def create(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        """A new folder with its config."""
        self.check_unused()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, to_toml(config).encode())
            self.rounds.touch()
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error

    def read_config(self) -> dict[str, dict[str, Any]]:
        """The config, or why there is none."""
        if not self.config.is_file():
            raise RunError(f"{self.path} is not a run: it has no config.toml")
        try:
            config = tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise RunError(f"{self.config} cannot be read: {error}") from error
        for table in ("run", "task", "algorithm"):
            if not isinstance(config.get(table), dict):
                raise RunError(f"{self.config} has no table [{table}]")
        if config["run"].get("wire") in ("auto", "encode", "count"):  # `messages`, before `wire` was a precision
            config["run"] |= {"messages": config["run"]["wire"], "wire": "float32"}
        return config

    def extend(self, rounds: int) -> None:
        """Have another number of rounds in the config."""
        config = self.read_config()
        write_atomically(self.config, to_toml({**config, "run": {**config["run"], "rounds": rounds}}))

    def reopen(self) -> None:
        """Forget how the run ended before: it has more rounds now, or diverged with other settings."""
        for path in (self.summary, self.diverged):
            path.unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        """One line a round."""
        append_line(self.rounds, json.dumps(without_nan(record)))

    def append_time(self, number: int, seconds: float) -> None:
        """How long a round took: apart from its record, because records are the same on every machine."""
        append_line(self.times, json.dumps({"round": number, "seconds": round(seconds, 4)}))

    def records(self) -> list[Record]:
        """All complete lines; a line cut short by a crash is not one."""
        try:
            lines = self.rounds.read_bytes().split(b"\n")[:-1] if self.rounds.exists() else []
            records = [json.loads(line) for line in lines]
        except (ValueError, OSError) as error:
            raise RunError(f"{self.rounds} is damaged: {error}") from error
        needed = {"round", "bytes_up", "bytes_down", "train_loss"}
        if not all(isinstance(record, dict) and needed <= record.keys() for record in records):
            raise RunError(f"{self.rounds} is damaged: a line is not a record")
        return records

    def truncate(self, rounds: int, expected: str, *, write: bool = True) -> list[Record]:
        """Forget what was recorded after the checkpoint, which expects records of this checksum before it.

        `write`: in the file as well; of several ranks only one does.
        """
        records = self.records()[:rounds]
        if [record.get("round") for record in records] != list(range(1, rounds + 1)):
            raise RunError(f"{self.rounds} does not hold rounds 1 to {rounds} of its checkpoint")
        if checksum(records) != expected:
            raise RunError(f"{self.checkpoint} does not belong to the records in {self.rounds}")
        if write:
            text = "".join(json.dumps(record) + "\n" for record in records)
            write_atomically(self.rounds, text.encode())
        return records

    def read_summary(self) -> Record:
        """The summary of a finished run."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise RunError(f"{self.summary} cannot be read: {error}") from error
        if not isinstance(summary, dict):
            raise RunError(f"{self.summary} is damaged: it is not a summary")
        return summary

    def finish(self, summary: Record, model: Params) -> None:
        """The end of a run."""
        write_atomically(self.model, to_bytes(model))
        write_atomically(self.summary, (json.dumps(without_nan(summary), indent=2) + "\n").encode())


def checksum(records: list[Record]) -> str:
    """CRC-32 of the lines of these records: a checkpoint belongs to the records that led to it."""
    text = "".join(json.dumps(without_nan(record)) + "\n" for record in records)
    return str(zlib.crc32(text.encode()))


def without_nan(record: Record) -> Record:
    """JSON has no NaN; a number that does not exist is null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def to_toml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values; JSON writes numbers, booleans, lists and (but for one character) strings as TOML does."""
    tables = []
    for table, values in config.items():
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
            for key, value in values.items()
        ]
        tables.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(tables) + "\n"
