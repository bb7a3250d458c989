"""The specification of a run in plain settings, and whether a run on disk matches it."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprior.catalogue.algorithms import ALGORITHMS, algorithm_settings, run_settings
from fedprior.catalogue.tasks import TASKS, full, is_file, task_options
from fedprior.core.errors import RunError
from fedprior.core.options import plain
from fedprior.core.settings import BEFORE, MACHINE, RUN_OPTIONS
from fedprior.report.records import Broken, read_run
from fedprior.runs.asked import Config, setting_tables
from fedprior.runs.folder import RunFolder

TASKS_SEED = "the task's seed"
"""The name in messages of a task's own seed; `seed` is the run's."""


@dataclass(frozen=True)
class Spec:
    """One run in plain settings: enough to start it, to find it on disk, and to continue it."""

    task: str
    algorithm: str
    out: Path
    seed: int = 0
    label: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    task_options: Mapping[str, Any] = field(default_factory=dict)
    algorithm_settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        """The config that its run must have. A value of the wrong type or range is an error.

        It lacks the settings that are left to the task: only the task knows them, and the task needs its data.
        """
        chosen = run_settings({**self.run, "seed": self.seed}).recorded()
        settings = algorithm_settings(self.algorithm, self.algorithm_settings)
        found = setting_tables(
            full(self.task) if is_file(self.task) else self.task,
            self.algorithm,
            self.label or self.algorithm,
            run={key: chosen.get(key) for key in (*self.run, "seed")},
            task_settings=task_options(self.task, self.task_options),
            algorithm_settings={key: settings[key] for key in self.algorithm_settings},
        )
        return {**found, "task": {"seed": None, **found["task"]}}  # a task's that is its run's is not in a config


def differences(
    recorded: Config, expected: Config, besides: Set[str] = MACHINE, *, whole: bool = False
) -> list[tuple[str, Any, Any]]:
    """The settings in which a run differs from what is expected: [("rounds", 3, 1000), …], the recorded value first.

    A setting that is newer than the recorded config had its default. With `whole`, further recorded settings that
    `expected` lacks are differences too.
    """
    name, task = expected["run"]["algorithm"], expected["run"]["task"]
    defaults = {
        "run": {key: option.default for key, option in RUN_OPTIONS.items() if option.default is not None} | BEFORE,
        "task": task_options(task, {}) if task in TASKS else {},
        "algorithm": algorithm_settings(name, {}) if name in ALGORITHMS else {},
    }
    found = []
    for table, known in defaults.items():
        for key in {**expected[table], **(recorded[table] if whole else {})}:
            default = plain(known[key]) if key in known else None
            was, now = recorded[table].get(key, default), expected[table].get(key)
            if key not in besides and was != now:
                found.append((TASKS_SEED if (table, key) == ("task", "seed") else key, was, now))
    return found


def check_same(out: Path, expected: Config, *, whole: bool = False) -> None:
    """Refuse to continue a run that was started with other settings. The machine may change."""
    folder = RunFolder(out)
    if not folder.config.exists():
        return
    for key, was, now in differences(folder.read_config(), expected, whole=whole):
        # A user cannot set what an experiment's method fixes, nor what is part of a folder's name.
        askable = whole and key not in ("task", "algorithm", "label", "seed", TASKS_SEED)
        hint = f", or ask for {key}={was}" if askable else ""
        raise RunError(f"{out} has {key} = {was}, not {now}; delete it, or choose another --out{hint}")


def missing(specs: Sequence[Spec]) -> list[Spec]:
    """The specs whose runs are not finished. This needs no data.

    A folder that holds a run with other settings, or no run, is an error.
    """
    left = []
    for spec in specs:
        found = read_run(spec.out)
        if isinstance(found, Broken) and RunFolder(spec.out).used():
            raise RunError(f"{spec.out} cannot be continued: {found.reason}; delete it, or choose another --out")
        check_same(spec.out, spec.config())
        if isinstance(found, Broken) or not found.finished:
            left.append(spec)
    return left
