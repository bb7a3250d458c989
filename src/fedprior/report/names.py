"""Names that tell runs apart, by what differs between those of one label."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedprior.core.options import plain
from fedprior.core.settings import BEFORE, MACHINE, RUN_OPTIONS
from fedprior.report.records import Run, group_runs

ORDER = ("algorithm", "run", "task")
"""Sections of config.toml, the most telling first."""
LONGEST = 60
"""Characters of a name; a run whose settings would be longer is named by its folder."""


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The same runs in the same order, with longer labels where those of one label differ by more than their seeds.

    A label gets the settings that differ: as few as suffice to tell apart all that settings can tell apart, without
    those of the run at their defaults. Runs that share both seed and settings get their folders, and so do those whose
    names would be long. Runs that differ only by seed keep one label, and are one group.
    """
    names: dict[int, str] = {}
    groups = group_runs(runs)
    for group in groups:
        shared = [other.task for other in groups if other.label == group.label]
        label = f"{group.task} {group.label}" if len(shared) > 1 else group.label
        keys = _telling(group.runs)
        for run in group.runs:
            values = {key: _value(run, section, key) for section, key in keys}
            settings = ", ".join(f"{key}={value}" for key, value in values.items() if value != _default(key))
            names[id(run)] = f"{label} {settings}".strip()
        names |= _shorter(group.runs, label, names)
    for name in set(names.values()):
        same = [run for run in runs if names[id(run)] == name]
        if len({run.seed for run in same}) < len(same):
            short = len({run.path.name for run in same}) == len(same)
            names |= {id(run): f"{name} ({run.path.name if short else run.path})" for run in same}
    return [replace(run, name=names[id(run)]) for run in runs]


def _shorter(runs: Sequence[Run], label: str, names: Mapping[int, str]) -> dict[int, str]:
    """The folders of runs of one label whose names are long; seeds of one setting keep the name that they share."""
    shared, folders = Counter(names[id(run)] for run in runs), Counter(run.path.name for run in runs)
    return {
        id(run): f"{label} ({run.path.name})"
        for run in runs
        if len(names[id(run)]) > LONGEST and shared[names[id(run)]] == folders[run.path.name] == 1
    }


def _telling(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Settings, each of which tells apart runs that the ones before it do not."""
    known = dict.fromkeys((section, key) for section in ORDER for run in runs for key in run.config[section])
    chosen: list[tuple[str, str]] = []
    for section, key in known:
        if key not in MACHINE and key != "seed" and _kinds(runs, [*chosen, (section, key)]) > _kinds(runs, chosen):
            chosen.append((section, key))
    return chosen


def _kinds(runs: Sequence[Run], keys: Iterable[tuple[str, str]]) -> int:
    return len({tuple(_value(run, section, key) for section, key in keys) for run in runs})


def _value(run: Run, section: str, key: str) -> str:
    """A setting of a run, in text; one that its config does not have is older than the setting, or none."""
    config = run.config[section]
    if section != "run" or key not in RUN_OPTIONS or key in config:
        return _text(config.get(key))
    return _text(plain(BEFORE.get(key, RUN_OPTIONS[key].default)))


def _default(key: str) -> str | None:
    """The default of a setting of the run; those of tasks and algorithms are not known here."""
    return _text(plain(RUN_OPTIONS[key].default)) if key in RUN_OPTIONS else None


def _text(value: Any) -> str:
    """A value as `--set` writes it."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
