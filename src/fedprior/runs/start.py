"""Start, repeat and resume runs: turn a task and an algorithm into a folder of records."""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedprior.catalogue.algorithms import ALGORITHMS, SIZES, recorded_algorithm, run_settings, sized
from fedprior.catalogue.tasks import TASKS, Task, is_file, recorded_task
from fedprior.core import locks
from fedprior.core.errors import DivergedError, FedpriorWarning, RunError, SettingError, counted, described
from fedprior.core.federated import FederatedData
from fedprior.core.files import write_atomically
from fedprior.core.frozen import fingerprint
from fedprior.core.options import as_table, convert
from fedprior.core.settings import BEFORE, RUN_OPTIONS, Settings
from fedprior.em import Algorithm
from fedprior.engines import privacy, ranks
from fedprior.engines.build import build
from fedprior.runs import checkpoint, kept
from fedprior.runs.asked import Parts, assemble, check_kind, config_of
from fedprior.runs.drive import Progress, Result, Session, drive
from fedprior.runs.folder import RunFolder, checksum


def run(
    task: Task | str,
    algorithm: Algorithm | str = "fedavg",
    *,
    out: Path | str | None = None,
    label: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Train. `settings` are those of the run (rounds, seed, batch_size, …); defaults are the task's.

    Pass the algorithm by name, or built: `algorithm("fedsparse", task.network, lambda0=5e-5)`. With `out`, the run is
    kept in that folder and can be resumed. `progress` is called after every round, and ends the run by returning STOP.
    """
    parts = assemble(task, algorithm, settings)
    _check_progress(progress)
    if out is not None and ranks.first():
        RunFolder(Path(out)).check_unused()
    with alone_in([] if out is None else [Path(out)]):
        session = start_session(parts, out, label)
        session.progress = progress
        return _one(drive([session]))


def alone_in(folders: Sequence[Path]) -> AbstractContextManager[None]:
    """Be the only writer of these folders; with several ranks, only the first writes."""
    return locks.alone_in(folders if ranks.first() else [])


def start_session(parts: Parts, out: Path | str | None = None, label: str | None = None) -> Session:
    """Create a run and its folder, before the first round. Hold `alone_in` from before this call to the end."""
    task, algorithm, settings = parts
    label = label or algorithm.name
    sim = build(algorithm, task.network, task.data, settings)
    prior = sim.algorithm.prior
    dense = getattr(getattr(prior, "gating", None), "dense", "")
    cautions = [*prior.cautions(settings.rounds), dense, privacy.caution(settings)]
    for caution in filter(None, cautions if ranks.first() else []):
        warnings.warn(caution, FedpriorWarning, stacklevel=3)
    about = {"task": task.name, "algorithm": algorithm.name, "label": label, "seed": settings.seed}
    about["partition"] = partition = task.data.fingerprint()
    folder = RunFolder(Path(out)) if out is not None else None
    if folder and ranks.first():
        folder.create(config_of(parts, label, partition))
        keep_partition(folder, task.data, partition)
    return Session(sim, settings, about, folder if ranks.first() else None, scale=task.scale)


def open_session(parts: Parts, out: Path, label: str | None = None) -> Session:
    """Open a run where its folder left it: at the start, or at its last checkpoint."""
    folder = RunFolder(out)
    if not folder.config.exists():
        return start_session(parts, out, label)
    return _reopen(folder, parts)


def _check_simulated(folder: RunFolder) -> None:
    """Refuse a run whose clients are not here."""
    if "flower" in folder.read_config():
        raise RunError(f"{folder.path} is a Flower run: continue it with `flwr run` and its resume option")


def _reopen(folder: RunFolder, parts: Parts) -> Session:
    """Open a run at its last checkpoint."""
    _check_simulated(folder)
    (task, algorithm, settings), (about, _, _, _) = parts, read_config(folder)
    partition = check_data(folder, task)
    if ranks.first():
        keep_partition(folder, task.data, partition)
    sim = build(algorithm, task.network, task.data, settings)
    about |= {"seed": settings.seed, "partition": partition}  # type: ignore[dict-item]
    # A run without a checkpoint was stopped in its first seconds, so it starts again.
    expected = checkpoint.load(folder.checkpoint, sim) if folder.checkpoint.exists() else checksum([])
    records = folder.truncate(sim.round, expected, write=ranks.first())
    if ranks.first():
        kept.go_on(folder, settings, sim.round, records)
    own = folder if ranks.first() else None
    session = Session(sim, settings, about, own, records, scale=task.scale, clock=sim.seconds)
    session.look_back()
    return session


def check_data(folder: RunFolder, task: Task) -> str:
    """Refuse a task whose clients or frozen weights are not those of the run; return the partition's fingerprint."""
    known = folder.read_config().get("frozen", {}).get("fingerprint")
    if known not in (None, found := fingerprint(task.network.module)):
        raise RunError(
            f"{folder.path} was trained beside the frozen weights {known}, not {found or 'none'}: adapt the same "
            "network as then"
        )
    partition = task.data.fingerprint()
    if not len(task.data.train.rows):  # the clients' examples are elsewhere
        return partition
    recorded = folder.read_config().get("partition", {}).get("fingerprint", partition)
    if recorded != partition:
        raise RunError(
            f"{folder.path} was trained on the partition {recorded}, not on {partition}: the data or task has changed "
            "(pass its original task, task=…)"
        )
    return partition


def resume(
    path: Path | str,
    *,
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    rounds: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Continue a run that was stopped, or extend one to `rounds` rounds in all.

    If the task or algorithm is your own, it cannot be read from the config: pass it again.
    """
    folder = RunFolder(Path(path))
    _check_progress(progress)
    _check_simulated(folder)
    _, settings, task, algorithm = rebuild(folder, task, algorithm)
    with alone_in([folder.path]):
        asked = settings.rounds if rounds is None else convert(RUN_OPTIONS["rounds"], rounds)
        if asked < (done := len(folder.records())):
            what = "rounds in its config.toml" if rounds is None else "--rounds"
            raise RunError(
                f"{folder.path} has {counted(done, 'round')} already: {what} must be at least that, got {asked}"
            )
        settings = replace(settings, rounds=asked)
        session = _reopen(folder, Parts(task, algorithm, settings))
        if rounds is not None and ranks.first():
            folder.extend(asked)
        session.progress = progress
        return _one(drive([session]))


def _one(outcomes: list[Result | DivergedError]) -> Result:
    """The result of a single run."""
    (outcome,) = outcomes
    if isinstance(outcome, DivergedError):
        raise outcome
    return outcome


VERBS = {"posterior": "sample"}
"""What a call does to a run, if its name does not say it."""


def rebuild(
    folder: RunFolder, task: Task | None, algorithm: Algorithm | None, call: str = "resume"
) -> tuple[dict[str, str], Settings, Task, Algorithm]:
    """A run's description, settings, task and algorithm, from its config or from what the user passes to `call`."""
    path, what = folder.path, f"{VERBS.get(call, call)} it"
    about, chosen, options, algorithm_options = read_config(folder)
    if task is None:
        if about["task"] not in TASKS and not is_file(about["task"]):
            app = "with --job, or " if call in ("export", "evaluate") and "flower" in folder.read_config() else ""
            or_network = "" if call == "resume" else " or network=…"
            raise RunError(
                f"{path} trained a task of your own, {about['task']!r}; "
                f"{what} {app}from Python: {call}({str(path)!r}, task=…{or_network})"
            )
        task = recorded_task(about["task"], options.pop("seed", chosen.seed), options)
    if algorithm is None:
        if about["algorithm"] == "own":
            raise RunError(
                f"{path} used an algorithm of your own; {what} from Python: {call}({str(path)!r}, algorithm=…)"
            )
        algorithm = recorded_algorithm(about["algorithm"], task.network, algorithm_options)
    else:
        _check_algorithm(folder, algorithm, about["algorithm"])
    return about, chosen, task, algorithm


def _check_algorithm(folder: RunFolder, algorithm: Algorithm, name: str) -> None:
    """Refuse an algorithm from the user that is not the one the run was started with."""
    check_kind(algorithm, Algorithm, "algorithm")
    if algorithm.name != name:
        raise RunError(f"{folder.path} was trained with {name}, not with {algorithm.name}")
    recorded, now = folder.read_config()["algorithm"], as_table(algorithm.recorded())
    for key in {**now, **recorded} if recorded else {}:  # older versions recorded nothing about a user's own algorithm
        if recorded.get(key) != now.get(key):
            raise RunError(
                f"{folder.path} was trained with {key} = {recorded.get(key)}, not {now.get(key)}: "
                "pass its original algorithm (algorithm=…)"
            )


def _check_progress(progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise SettingError(f"progress is {described(progress)}; give a function that takes a round's record")


def read_config(folder: RunFolder) -> tuple[dict[str, str], Settings, dict[str, Any], dict[str, Any]]:
    """A run's description, its settings, and the options of its task and algorithm."""
    config = folder.read_config()
    about = {key: str(config["run"].pop(key, "")) for key in ("task", "algorithm", "label")}
    for key, value in about.items():
        if not value:
            raise RunError(f"{folder.config} has no {key!r}")
    return (
        about,
        run_settings({**BEFORE, **config["run"]}),
        config["task"],
        _present(folder, about, config["algorithm"]),
    )


RETIRED = ("sparsity", "max_parameters", "shrink", "conv_rate", "linear_rate", "average")
"""Settings that FedSparse had while it included FedNarrow."""


def _present(folder: RunFolder, about: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Today's settings of a run that may be older. Without a size, the retired ones had no effect."""
    name = about["algorithm"]
    if not name.startswith("fedsparse") or (name in ALGORITHMS and sized(name)) or "max_parameters" not in settings:
        return dict(settings)
    if any(settings.get(key, "none") != "none" for key in SIZES):
        raise RunError(
            f"{folder.path} is from a version in which today's fednarrow was fedsparse with a size: open "
            "it with the fedprior that made it, or train it again with --algorithm fednarrow"
        )
    dense = 0 if settings.get("dense_rounds") == "none" else settings.get("dense_rounds", 0)
    return {**{key: value for key, value in settings.items() if key not in RETIRED}, "dense_rounds": dense}


def unused_folder(path: Path) -> Path:
    """The path, or the first of path-2, path-3, … that does not exist yet."""
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def keep_partition(folder: RunFolder, data: FederatedData, fingerprint: str) -> None:
    """Store class counts per client next to the run, once; one line per client."""
    if folder.partition.exists():
        return
    about = {"fingerprint": fingerprint, "classes": data.classes if data.labelled else 0}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()]
    for name, counts in zip(("train", "test"), data.class_counts(), strict=True):
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in counts.tolist())
        lines.append(f'"{name}": [\n{rows}\n]')
    write_atomically(folder.partition, ("{" + ",\n".join(lines) + "}\n").encode())
