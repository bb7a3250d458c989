"""The two halves of a Flower app: a ServerApp that keeps a run's folder, and a ClientApp around the E-step."""

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.utils import get_flwr_home
from rich.console import Console

from fedprior.core.errors import DataError, FedpriorError, RunError
from fedprior.core.federated import ClientData
from fedprior.core.locks import alone_in
from fedprior.core.settings import EXTENDS, MACHINE
from fedprior.engines.server_state import Record, learned
from fedprior.flower import messages, server_checkpoint
from fedprior.flower.job import Job, Limits
from fedprior.flower.node import Node
from fedprior.flower.server import Server
from fedprior.flower.strategy import HardEM
from fedprior.report import summary_table
from fedprior.runs.folder import RunFolder, checksum
from fedprior.runs.specs import differences
from fedprior.runs.start import unused_folder

log = logging.getLogger("flwr")

MakeJob = Callable[[Mapping[str, Any]], Job]
"""Builds the job from the app's run config."""
MakeData = Callable[[Job, Context], ClientData]
"""Loads this client's examples, given the job and the node's context."""


def client_app(make_job: MakeJob, make_data: MakeData | None = None) -> ClientApp:
    """Build a ClientApp. Without `make_data`, a client uses its part of the named task's data."""
    app = ClientApp()

    def node(context: Context) -> Node:
        job, number = make_job(context.run_config), client_number(context)
        job.check_client(number)
        data = make_data(job, context) if make_data is not None else job.part(number)
        folder = Path(str(context.node_config.get("state-dir", get_flwr_home() / "fedprior")))
        return Node.new(job, number, data, folder)

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        def content() -> RecordDict:
            return RecordDict({messages.NUMBERS: MetricRecord(dict(node(context).introduce()))})

        return _replying(message, content)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def content() -> RecordDict:
            order = messages.read_order(message.content)
            return messages.write_answer(node(context).respond(order))

        return _replying(message, content)

    return app


def client_number(context: Context) -> int:
    """Return which client a node is: `partition-id` of its node config. Flower's simulation sets it by itself."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError("this node does not know which client it is: start it with --node-config 'partition-id=0'")
    return number


def _replying(message: Message, content: Callable[[], RecordDict]) -> Message:
    """Always return a reply: a client that returns nothing leaves its SuperNode waiting."""
    try:
        return Message(content(), reply_to=message)
    except Exception as error:
        log.error("the client failed", exc_info=error)
        kind = "" if isinstance(error, FedpriorError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())[:300]
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


def server_app(make_job: MakeJob) -> ServerApp:
    """Build a ServerApp that trains the job, keeps its run in a folder and can resume it."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(make_job(context.run_config), grid, context.run_config)
        except FedpriorError as error:
            # Flower logs the traceback of any exception raised here. It would bury the line that says what to do.
            raise error.with_traceback(None) from None

    return app


def serve(job: Job, grid: Grid, config: Mapping[str, Any]) -> Record:
    """Run the remaining rounds in the folder that the config gives as `out` or `resume`."""
    limits = Limits.of(config)
    limits.needed(job.settings.clients_per_round)  # a mistake in them should leave no folder behind
    resume = str(config.get("resume", ""))
    folder = RunFolder(Path(resume)) if resume else _new_folder(job, str(config.get("out", "")))
    # Another server may be at work: the run was resumed twice, or the server of a killed SuperLink has not ended yet.
    with alone_in([folder.path]):
        if not resume:
            folder.create({**job.config(), "flower": {"run": secrets.token_hex(8), "clients": job.clients}})
        server, records = _open(folder, job)
        log.info("the run is kept in %s", folder.path.resolve())

        def keep(record: Record) -> None:
            records.append(record)
            folder.append(record)
            server_checkpoint.save(folder.checkpoint, server, checksum(records))

        HardEM(server, limits, keep).start(grid)
        summary, model = server.summary(records), server.model()
        folder.finish(summary, learned(model))
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
    run = str(found.get("flower", {}).get("run", ""))
    if not run:
        raise RunError(f"{folder.path} is not a Flower run; `fedprior resume {folder.path}` resumes a simulation")
    for key, was, value in differences(found, now, EXTENDS | MACHINE, whole=True):
        raise RunError(f"{folder.path} was started with {key} = {was}, not {value}: resume it without this change")
    server = Server.new(job, run)
    # Without a checkpoint, the run is new, or it was stopped in its first round and starts again.
    expected = server_checkpoint.load(folder.checkpoint, server) if folder.checkpoint.exists() else checksum([])
    return server, folder.truncate(server.round, expected)
