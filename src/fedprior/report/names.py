"""Names that tell runs apart, by what differs between those of one label."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fedprior.core.settings import MACHINE
from fedprior.report.records import Run, group_runs

ORDER = ("algorithm", "run", "task")
"""Sections of config.toml, the most telling first."""


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The same runs in the same order, with longer labels where those of one label differ by more than their seeds.

    A label gets the settings that differ: as few as suffice to tell apart all that settings can tell apart. Runs that
    share both seed and settings get their folders. Runs that differ only by seed keep one label, and are one group.
    """
    names: dict[int, str] = {}
    groups = group_runs(runs)
    for group in groups:
        shared = [other.task for other in groups if other.label == group.label]
        label = f"{group.task} {group.label}" if len(shared) > 1 else group.label
        keys = _telling(group.runs)
        for run in group.runs:
            settings = ", ".join(f"{key}={_text(run.config[section].get(key))}" for section, key in keys)
            names[id(run)] = f"{label} {settings}".strip()
    for name in set(names.values()):
        same = [run for run in runs if names[id(run)] == name]
        if len({run.seed for run in same}) < len(same):
            short = len({run.path.name for run in same}) == len(same)
            names |= {id(run): f"{name} ({run.path.name if short else run.path})" for run in same}
    return [replace(run, name=names[id(run)]) for run in runs]


def _telling(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Settings, each of which tells apart runs that the ones before it do not."""
    known = dict.fromkeys((section, key) for section in ORDER for run in runs for key in run.config[section])
    chosen: list[tuple[str, str]] = []
    for section, key in known:
        if key not in MACHINE and key != "seed" and _kinds(runs, [*chosen, (section, key)]) > _kinds(runs, chosen):
            chosen.append((section, key))
    return chosen


def _kinds(runs: Sequence[Run], keys: Iterable[tuple[str, str]]) -> int:
    return len({tuple(_text(run.config[section].get(key)) for section, key in keys) for run in runs})


def _text(value: Any) -> str:
    """A value as `--set` writes it. A setting missing from a config is none, or newer than the run."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
