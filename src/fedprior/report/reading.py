"""The one reader of a run's folder: config.toml, rounds.jsonl, summary.json, partition.json, times.jsonl.

What cannot be read raises a `ValueError` (or the system's `OSError`) whose text names the file and says what is wrong.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedprior.core.late import is_number

FILES = ("config.toml", "rounds.jsonl", "summary.json")
"""A folder that has any of these holds a run."""
SECTIONS = ("run", "task", "algorithm")
"""The tables of config.toml that hold settings."""
MOST_ROUNDS = 10**9
"""More rounds than this are a damaged config."""
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
    with _damaged("config.toml is damaged"):
        config = tomllib.loads(path.read_text(encoding="utf-8"))
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
        value = run.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"config.toml has no {key} of a run")
    if not 0 <= run["rounds"] < MOST_ROUNDS:
        raise ValueError(f"config.toml is damaged: no run has {run['rounds']} rounds")


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of rounds.jsonl; a line that a crash cut short has no end and does not count."""
    path, records = folder / "rounds.jsonl", []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else [], 1):
        with _damaged(f"rounds.jsonl is damaged in line {number}"):
            record = _parsed(line)
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
    with _damaged("summary.json is damaged"):
        summary = _parsed(path.read_bytes())
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


def _parsed(text: bytes) -> Any:
    """What JSON says, if all of it can be written again: half of a surrogate pair, say, cannot."""
    value = json.loads(text)
    if b"\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


@contextmanager
def _damaged(what: str) -> Iterator[None]:
    """Report whatever a file's content does to its reader as one kind of error."""
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"{what}: it is nested too deeply") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{what}: {error}") from error


def read_partition(folder: Path) -> Partition | None:
    """What partition.json says, if there is one."""
    path = folder / "partition.json"
    if not path.is_file():
        return None
    with _damaged("partition.json is damaged"):
        held = _parsed(path.read_bytes())
        train, test = (np.array(held[name], np.int64) for name in ("train", "test"))
        if train.ndim != 2 or train.shape != test.shape or train.shape[1] != max(held["classes"], 1):
            raise ValueError("counts do not have one row per client and one column per class")
        return Partition(str(held["fingerprint"]), int(held["classes"]), train, test)


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
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return seconds
