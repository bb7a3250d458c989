"""A device's half of a Flower app: a ClientApp around the E-step. It imports nothing that only a server needs.

Nor Flower itself, of which half is for servers, before there is an app to build: whoever runs one has loaded it.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedprior.core.errors import DataError, FedpriorError
from fedprior.core.federated import ClientData
from fedprior.flower.job import Job, MakeJob, with_rounds
from fedprior.flower.node import Node

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp

log = logging.getLogger("flwr")

MakeData = Callable[[Job, "Context"], ClientData]
"""Loads this client's examples, given the job and the node's context."""


def client_app(make_job: MakeJob, make_data: MakeData | None = None) -> "ClientApp":
    """Build a ClientApp. Without `make_data`, a client uses its part of the named task's data."""
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    from fedprior.flower import messages

    app = ClientApp()

    def node(message: Message, context: Context) -> Node:
        config = with_rounds({**context.run_config, **messages.read_asked(message.content)})
        job, number = make_job(config), client_number(context)
        job.check_client(number)
        data = make_data(job, context) if make_data is not None else job.part(number)
        return Node.new(job, number, data, _state_folder(context))

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        def content() -> RecordDict:
            return messages.write_introduction(node(message, context))

        return _replying(message, content)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def content() -> RecordDict:
            order = messages.read_order(message.content)
            one = node(message, context)
            log.info("round %d: client %d computes", order.number, one.client)
            return messages.write_answer(one.respond(order))

        return _replying(message, content)

    return app


def _state_folder(context: "Context") -> Path:
    """Return where a client keeps what it remembers."""
    from flwr.supercore.utils import get_flwr_home  # brings a web client with it

    return Path(str(context.node_config.get("state-dir", get_flwr_home() / "fedprior")))


def client_number(context: "Context") -> int:
    """Return which client a node is: `partition-id` of its node config. Flower's simulation sets it by itself."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError("this node does not know which client it is: start it with --node-config 'partition-id=0'")
    return number


def _replying(message: "Message", content: "Callable[[], RecordDict]") -> "Message":
    """Always return a reply: a client that returns nothing leaves its SuperNode waiting."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    try:
        return Message(content(), reply_to=message)
    except Exception as error:
        log.error("the client failed", exc_info=error)
        kind = "" if isinstance(error, FedpriorError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())[:300]
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
