"""The one reader of a run's folder: config.toml, rounds.jsonl, summary.json, partition.json, times.jsonl.

What cannot be read raises a `ValueError` (or the system's `OSError`) whose text names the file and says what is wrong.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedprior.core.late import is_number

FILES = ("config.toml", "rounds.jsonl", "summary.json")
"""A folder that has any of these holds a run."""
SECTIONS = ("run", "task", "algorithm")
"""The tables of config.toml that hold settings."""
RECORDED = ("global_accuracy", "local_accuracy", "sparsity", "bytes_up", "bytes_down")
"""What summaries have; accuracies only where targets are classes. Null is a number that does not exist, for example
because there are no test examples."""


@dataclass(frozen=True)
class Partition:
    """How many examples of each class each client has: [clients, classes]; without labels, one column of examples."""

    fingerprint: str
    classes: int
    train: np.ndarray
    test: np.ndarray


def read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of config.toml."""
    path = folder / "config.toml"
    if not path.is_file():
        raise ValueError("has no config.toml")
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.toml is damaged: {error}") from error
    for section in SECTIONS:
        if not isinstance(config.get(section), dict):
            raise ValueError(f"config.toml has no table [{section}]")
    run = config["run"]
    if run.get("wire") in ("auto", "encode", "count"):  # now `messages`; `wire` became a precision
        run |= {"messages": run["wire"], "wire": "float32"}
    return config


def check_about(run: Mapping[str, Any]) -> None:
    """Refuse a config that does not identify its run; resuming a run checks all its settings."""
    for key, kind in {"task": str, "algorithm": str, "label": str, "seed": int, "rounds": int}.items():
        if not isinstance(run.get(key), kind):
            raise ValueError(f"config.toml has no {key} of a run")


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of rounds.jsonl; a line that a crash cut short has no end and does not count."""
    path, records = folder / "rounds.jsonl", []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else [], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"rounds.jsonl is damaged in line {number}: {error}") from error
        if not isinstance(record, dict) or record.get("round") != number:
            raise ValueError(f"rounds.jsonl is damaged: line {number} is not round {number}")
        if not all(is_number(record.get(key)) for key in ("bytes_up", "bytes_down")):
            raise ValueError(f"rounds.jsonl is damaged: line {number} has no bytes")
        if "train_loss" not in record:
            raise ValueError(f"rounds.jsonl is damaged: line {number} has no train_loss")
        records.append(record)
    return records


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What summary.json says; none for an unfinished run."""
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"summary.json is damaged: {error}") from error
    if not isinstance(summary, dict) or not isinstance(summary.get("rounds"), int):
        raise ValueError("summary.json is damaged: it does not say how many rounds there were")
    for key in RECORDED:
        if not _is_entry(summary, key):
            raise ValueError(f"summary.json is damaged: {key} is not a number")
    return summary


def _is_entry(summary: Mapping[str, Any], key: str) -> bool:
    """Whether a summary says what it must: bytes always, other numbers or null, an accuracy where there is one."""
    value = summary.get(key)
    if value is not None:
        return is_number(value, finite=False)
    return not key.startswith("bytes") and (key in summary or key.endswith("accuracy"))


def read_partition(folder: Path) -> Partition | None:
    """What partition.json says, if there is one."""
    path = folder / "partition.json"
    if not path.is_file():
        return None
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        train, test = (np.array(held[name], np.int64) for name in ("train", "test"))
        if train.ndim != 2 or train.shape != test.shape or train.shape[1] != max(held["classes"], 1):
            raise ValueError("counts do not have one row per client and one column per class")
        return Partition(str(held["fingerprint"]), int(held["classes"]), train, test)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"partition.json is damaged: {error}") from error


def read_trouble(folder: Path) -> str:
    """Why there will be no more rounds, if the run diverged."""
    path = folder / "diverged.txt"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def round_seconds(folder: Path) -> dict[int, float]:
    """Seconds by round, from times.jsonl; for a round that was run again, those of its last run.

    Nothing depends on these numbers, so a damaged line is left out.
    """
    seconds: dict[int, float] = {}
    try:
        lines: Sequence[str] = (folder / "times.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return seconds
    for line in lines:
        try:
            record = json.loads(line)
            seconds[int(record["round"])] = float(record["seconds"])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    return seconds
