"""What a run was asked for, kept in its folder, so that a resumed run takes everything from there.

The run config of the command that resumes it cannot say that: Flower fills it with the app's defaults, and nobody can
tell them from what was typed. The devices get that run config as well, so the server tells them what it found.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedprior.catalogue.tasks import Task
from fedprior.catalogue.tasks.base import task_elsewhere
from fedprior.catalogue.tasks.from_file import made_by
from fedprior.core.errors import RunError, SettingError, described
from fedprior.core.settings import MACHINE
from fedprior.flower.job import Job, Limits, parse_settings, with_rounds
from fedprior.runs.folder import RunFolder

log = logging.getLogger("flwr")
OWN = frozenset({"out", "resume", "rounds", "metrics"}) | {f.name.replace("_", "-") for f in fields(Limits)}
"""The keys of a run config that belong to one command: its folder, how far it goes, how long it waits."""


def given(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run config says about what is trained: `task`, `algorithm`, `settings` and keys of the app's own."""
    return {key: value for key, value in with_rounds(config).items() if key not in OWN}


def asked(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the run in this folder was asked for, and for how many rounds now.

    Of the new command's settings only those that say where it computes are used, such as `device`.
    """
    found = folder.read_config()
    kept, now = kept_config(folder), given({**config, "rounds": 0})
    unused = {key: value for key, value in now.items() if key != "devices" and key in kept and kept[key] != value}
    if unused:
        words = ", ".join(f"{key}={value!r}" for key, value in unused.items())
        log.warning("%s goes on as it was started; not used: %s. More rounds: rounds=…", folder.path, words)
    here = [f"{key}={value}" for key, value in parse_settings(now).items() if key in MACHINE]
    if here and "settings" in kept:
        kept["settings"] = "; ".join([str(kept["settings"]), *here])
    if config.get("devices"):  # one of them may have been replaced
        kept["devices"] = config["devices"]
    return {**kept, "rounds": config.get("rounds") or found["run"]["rounds"]}


def job_of(folder: RunFolder, function: str) -> Job:
    """The job of the run in this folder, made anew by its app's `FILE.py:make_job`."""
    job = made_by(function, {**kept_config(folder), "resume": str(folder.path)})
    if not isinstance(job, Job):
        raise SettingError(f"{function} returned {described(job)}; name the app's function that makes its job")
    return job


def task_of(job: Job) -> Task:
    """A job as a task: with a named task's data or, of your own, with the server's test examples alone."""
    if job.data is not None:
        return Task(job.task, job.network, job.data)
    test = None if job.test is None else (job.test.test_x, job.test.test_y)
    return task_elsewhere(job.task, job.network, job.clients, test)


def kept_config(folder: RunFolder) -> dict[str, Any]:
    """The run config that the folder holds; an older version kept none."""
    about = folder.read_config().get("flower")
    if about is None:
        raise RunError(f"{folder.path} is not a Flower run; `fedprior resume {folder.path}` resumes a simulation")
    try:
        kept = json.loads(about.get("config", "{}"))
        if isinstance(kept, dict) and all(isinstance(value, str | int | float) for value in kept.values()):
            return kept
    except (TypeError, ValueError, RecursionError):
        pass
    raise RunError(f"{folder.config} is damaged: its run config cannot be read")
