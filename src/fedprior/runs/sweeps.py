"""Many runs. On a GPU, those that differ only in seed and in scalar settings of the prior train together."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedprior.catalogue.tasks import Task
from fedprior.core.choices import directions
from fedprior.core.errors import DivergedError, SettingError
from fedprior.core.options import plain
from fedprior.engines.modes import mode_of
from fedprior.runs import start
from fedprior.runs.asked import Parts, assemble, config_of, sort_settings
from fedprior.runs.drive import Progress, Result, Session, drive
from fedprior.runs.specs import Spec, check_same, missing

Outcome = Result | DivergedError
Watch = Callable[[list[Spec], int], AbstractContextManager[Progress | None]]
"""Shows the progress of specs that train together for this many rounds, from the records of the first."""


def train(specs: Sequence[Spec], watch: Watch | None = None) -> list[Outcome]:
    """Train every spec, from its checkpoint if it has one; outcomes are in the order of the specs."""
    tasks: dict[str, Task] = {}
    built = [_build(spec, tasks) for spec in specs]
    for spec, parts in zip(specs, built, strict=True):  # check everything before training anything
        _check(spec, parts)
    outcomes: dict[int, Outcome] = {}
    # Lock all folders until the end, so that the same sweep in a second terminal is refused at its start, not midway.
    with start.alone_in([spec.out for spec in specs]):
        for places in _mates(specs, built):
            group = [specs[place] for place in places]
            with (watch or _quiet)(group, built[places[0]].settings.rounds) as progress:
                sessions = [start.open_session(built[place], specs[place].out, specs[place].label) for place in places]
                sessions[0].progress = progress
                outcomes |= dict(zip(places, _drive(sessions), strict=True))
    return [outcomes[place] for place in range(len(specs))]


def train_missing(specs: Sequence[Spec], watch: Watch | None = None) -> list[tuple[Spec, Outcome]]:
    """Train the specs that still need it, and return their outcomes."""
    left = unfinished(specs)
    return list(zip(left, train(left, watch), strict=True))


def unfinished(specs: Sequence[Spec]) -> list[Spec]:
    """The specs that still need training. A folder that holds a run with other settings is an error."""
    left = missing(specs)
    tasks: dict[str, Task] = {}
    for spec in specs:
        if spec not in left:
            _check(spec, _build(spec, tasks))
    return left


def _check(spec: Spec, parts: Parts) -> None:
    """Refuse a folder that holds a run with other settings, including those that the spec leaves to its task."""
    check_same(spec.out, config_of(parts, spec.label or spec.algorithm), whole=True)


def _quiet(group: list[Spec], rounds: int) -> AbstractContextManager[Progress | None]:
    return nullcontext()


def _build(spec: Spec, tasks: dict[str, Task]) -> Parts:
    """Build a spec's task, algorithm and settings; specs with the same task and seed share the task."""
    key, run = repr((spec.task, spec.seed, sorted(spec.task_options.items()))), {**spec.run, "seed": spec.seed}
    parts = assemble(tasks.get(key, spec.task), spec.algorithm, run, spec.task_options, spec.algorithm_settings)
    tasks[key] = parts.task
    return parts


def _mates(specs: Sequence[Spec], built: Sequence[Parts]) -> list[list[int]]:
    """The places of specs that may train together."""
    groups: dict[str, list[int]] = {}
    for place, (spec, (task, algorithm, settings)) in enumerate(zip(specs, built, strict=True)):
        fixed = {key: plain(v) for key, v in algorithm.settings.items() if key not in algorithm.prior.scalars}
        fixed["per_client"] = algorithm.prior.per_client  # with a rate of zero, nothing is drawn at all
        data = [task.data.clients, id(task.data.x), id(task.data.test_x)]
        alike = [spec.task, algorithm.name, fixed, {**task.options}, repr(replace(settings, seed=0)), data]
        groups.setdefault(json.dumps(alike, default=str), []).append(place)
    return list(groups.values())


def _drive(sessions: list[Session]) -> list[Outcome]:
    """Train jobs at the same round together if the mode allows it, else one after another.

    A job that may stop early also trains alone.
    """
    settings, first = sessions[0].settings, sessions[0].simulation
    in_turn = settings.patience is not None or mode_of(settings.mode, settings.messages, first) == "in-turn"
    groups: dict[int, list[int]] = {}
    for place, session in enumerate(sessions):
        groups.setdefault(place if in_turn else session.simulation.round, []).append(place)
    outcomes: dict[int, Outcome] = {}
    for places in groups.values():
        outcomes |= dict(zip(places, drive([sessions[place] for place in places]), strict=True))
    return [outcomes[place] for place in range(len(sessions))]


def plan(
    task: str,
    algorithm: str,
    seeds: Sequence[int],
    settings: Mapping[str, str],
    out: Path,
    options: Mapping[str, Any],
) -> list[Spec]:
    """One spec for each combination of the settings' values and each seed; `options` are the run's."""
    if "seed" in settings:
        raise SettingError("a sweep has several seeds; name them with --seeds")
    varied = [key for key, text in settings.items() if len(_values(text)) > 1]
    specs = []
    for chosen in grid(settings):
        for_run, for_task, for_algorithm = sort_settings(chosen, task, [algorithm])
        setting = ",".join(f"{key}={chosen[key]}" for key in varied)
        for seed in seeds:
            specs.append(
                Spec(
                    task=task,
                    algorithm=algorithm,
                    out=out / (setting.replace("/", "_") or algorithm) / f"seed-{seed}",
                    seed=seed,
                    label=f"{algorithm} {setting}".strip(),
                    run={**options, **for_run},
                    task_options=for_task,
                    algorithm_settings=for_algorithm[algorithm],
                )
            )
    if len({spec.out for spec in specs}) < len(specs):
        raise SettingError("a seed or a value of a setting is given twice; each run needs its own folder")
    _check_apart(specs)
    return specs


def _check_apart(specs: Sequence[Spec]) -> None:
    """Refuse one run under two labels: 5e-6 and 0.000005 are one value."""
    seen: dict[str, str] = {}
    for spec in specs:
        config = spec.config()
        run = {**config["run"], "label": ""}
        run |= {"wire": directions(run["wire"])} if "wire" in run else {}
        known = seen.setdefault(json.dumps({**config, "run": run}, default=str), spec.label)
        if known != spec.label:
            raise SettingError(f"{known!r} and {spec.label!r} are the same settings; each run needs its own")


def grid(settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Every combination of values separated by commas: `{"lambda0": "1e-6,1e-5"}` gives two."""
    choices = {key: _values(text) for key, text in settings.items()}
    for combination in itertools.product(*choices.values()):
        yield dict(zip(choices, combination, strict=True))


def _values(text: str) -> list[str]:
    """Split at commas, but not inside brackets: Adam(lr=0.1, eps=1e-3) is one value, and so is [fc1,fc2]."""
    values, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            values.append(current.strip())
            current = ""
        else:
            current += character
    values.append(current.strip())
    if not all(values):
        raise SettingError(f"an empty value in {text!r}")
    return [value[1:-1] if value.startswith("[") and value.endswith("]") else value for value in values]
