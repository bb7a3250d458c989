"""The server's half of a Flower app: a ServerApp that keeps a run's folder and can resume it."""

import json
import logging
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedprior.core.errors import FedpriorError, RunError
from fedprior.core.locks import alone_in
from fedprior.core.settings import EXTENDS, MACHINE
from fedprior.engines import privacy
from fedprior.engines.server_state import Record, learned
from fedprior.flower import expiry, metrics, resumed, server_checkpoint
from fedprior.flower.job import Job, Limits, MakeJob, with_rounds
from fedprior.flower.roster import read_devices
from fedprior.flower.server import Server
from fedprior.flower.strategy import HardEM
from fedprior.report import summary_table
from fedprior.report.jumps import line, seen_now
from fedprior.runs import kept
from fedprior.runs.folder import RunFolder, checksum
from fedprior.runs.specs import differences
from fedprior.runs.start import keep_partition, unused_folder

log = logging.getLogger("flwr")


def server_app(make_job: MakeJob) -> ServerApp:
    """Build a ServerApp that trains the job, keeps its run in a folder and can resume it."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for warning in expiry.warnings(sys.argv[1:]):
            log.warning("%s", warning)
        try:
            config, resume = dict(context.run_config), str(context.run_config.get("resume", ""))
            asked = resumed.asked(RunFolder(Path(resume)), config) if resume else {}
            serve(make_job(with_rounds({**config, **asked})), grid, config, asked)
        except FedpriorError as error:
            # Flower logs the traceback of any exception raised here. It would bury the line that says what to do.
            raise error.with_traceback(None) from None

    return app


def serve(job: Job, grid: Grid, config: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> Record:
    """Run the remaining rounds in the folder that the config gives as `out` or `resume`.

    `asked` is what a resumed run was started with; devices must be told.
    """
    limits, told = Limits.of(config), dict(asked or {})
    bound = read_devices(str(told.pop("devices", config.get("devices", ""))), job.clients)
    limits.check(job)  # a mistake in them should leave no folder behind
    resume = str(config.get("resume", ""))
    folder = RunFolder(Path(resume)) if resume else _new_folder(job, str(config.get("out", "")))
    # Another server may be at work: the run was resumed twice, or the server of a killed SuperLink has not ended yet.
    with alone_in([folder.path]):
        if not resume:
            about = {"run": secrets.token_hex(8), "clients": job.clients, "config": json.dumps(resumed.given(config))}
            folder.create({**job.config(), "flower": about})
            if why := privacy.caution(job.settings):
                log.warning("%s", why)
            if job.data is not None:
                keep_partition(folder, job.data, job.data.fingerprint())
        server, records = _open(folder, job)
        log.info("the run is kept in %s", folder.path.resolve())

        spent = [server.seconds]

        def keep(record: Record) -> None:
            records.append(record)
            folder.append(record)
            folder.append_time(record["round"], server.seconds - spent[-1])
            spent.append(server.seconds)
            if "sparsity" in record:
                folder.append_clients(record["round"], server.clients)
            server_checkpoint.save(folder.checkpoint, server, checksum(records))
            kept.keep(folder, job.settings, server.round, records)
            if jump := seen_now(records):
                log.warning("%s", line(jump, folder.path.resolve()))

        labels = {"task": job.task, "algorithm": job.algorithm.name, "run": folder.path.name}
        with (
            folder.resumable(),
            metrics.serving(str(config.get("metrics", "")), records, job.settings.rounds, labels),
        ):
            HardEM(server, limits, keep, told, bound).start(grid)
            summary = server.summary(records)
            folder.finish(summary, learned(server.model()))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(summary_table([summary]))
    log.info("\n%s", capture.get())
    return summary


def _new_folder(job: Job, out: str) -> RunFolder:
    """Return the folder of a new run."""
    name = f"flower-{job.task}-{job.algorithm.name}-{job.settings.seed}"
    folder = RunFolder(Path(out) if out else unused_folder(Path("runs") / name))
    if folder.config.exists():
        raise RunError(
            f"{folder.path} exists already: continue it with resume instead of out, or choose another folder"
        )
    folder.check_unused()
    return folder


def _open(folder: RunFolder, job: Job) -> tuple[Server, list[Record]]:
    """Restore the server and the records from the run's folder."""
    found, now = folder.read_config(), job.config()
    if not (run := folder.deployed):
        raise RunError(f"{folder.path} is not a Flower run; `fedprior resume {folder.path}` resumes a simulation")
    for key, was, value in differences(found, now, EXTENDS | MACHINE, whole=True):
        raise RunError(f"{folder.path} was started with {key} = {was}, not {value}: resume it without this change")
    rounds, before = job.settings.rounds, int(found["run"]["rounds"])
    if rounds < before:
        raise RunError(f"{folder.path} was started for {before} rounds: rounds may be more, not {rounds}")
    if rounds > before:
        folder.extend(rounds)
    server = Server.new(job, run)
    # Without a checkpoint, the run is new, or it was stopped in its first round and starts again.
    expected = server_checkpoint.load(folder.checkpoint, server) if folder.checkpoint.exists() else checksum([])
    records = folder.truncate(server.round, expected)
    kept.go_on(folder, job.settings, server.round, records)
    if server.round < rounds:
        folder.reopen()
    return server, records
