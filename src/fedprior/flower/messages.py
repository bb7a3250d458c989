"""Put our bytes into Flower's records and read them back, checking what other machines send field by field.

Every message holds one opaque array of bytes (`stype` "raw": never handed to NumPy's or torch's loaders, so nothing can
be unpickled) and one small record of numbers.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedprior.core.errors import WireError
from fedprior.flower.job import Limits
from fedprior.flower.memory import check_run
from fedprior.flower.node import Answer, Node, Order
from fedprior.flower.server import Round, Server, Upload

WIRE, ABOUT, NUMBERS, ARRAY, ASKED = "wire", "about", "numbers", "message", "asked"


def write_asked(asked: Mapping[str, Any]) -> RecordDict:
    """Return the content of a greeting: for a resumed run, what it was started with; otherwise nothing."""
    return RecordDict({ASKED: ConfigRecord(dict(asked))} if asked else {})


def read_asked(content: RecordDict) -> dict[str, Any]:
    """Invert `write_asked`, at the client."""
    return dict(content.config_records.get(ASKED, {}))


def write_order(order: Order, asked: Mapping[str, Any] | None = None) -> RecordDict:
    """Return the content of a message to a client."""
    about = ConfigRecord({"round": order.number, "run": order.run, "accepted": order.accepted})
    return RecordDict({WIRE: _wrap(order.packet), ABOUT: about, **write_asked(asked or {})})


def read_order(content: RecordDict) -> Order:
    """Invert `write_order`, at the client."""
    about = content.config_records.get(ABOUT)
    if about is None:
        raise WireError("the server's message does not say what it is about")
    number, accepted = about.get("round"), about.get("accepted")
    if not _whole(number, 1, 2**32 - 1) or not _whole(accepted, 0, 2**32 - 1):
        raise WireError("the server's message names no round")
    return Order(_unwrap(content), number, check_run(about.get("run")), accepted)


def write_introduction(node: Node) -> RecordDict:
    """Return the content of a client's answer to a greeting."""
    return RecordDict({NUMBERS: MetricRecord(dict(node.introduce())), ABOUT: ConfigRecord(dict(node.job.agreed()))})


def write_answer(answer: Answer) -> RecordDict:
    """Return the content of a client's reply."""
    return RecordDict({WIRE: _wrap(answer.upload), NUMBERS: MetricRecord(dict(answer.metrics))})


def numbers(content: RecordDict) -> dict[str, Any]:
    """Return a client's numbers, unchecked."""
    found = content.metric_records.get(NUMBERS)
    if found is None:
        raise WireError("the reply has no metrics")
    return dict(found)


def payload_bytes(message: Message) -> int:
    """Count the bytes of arrays in a reply, whether it is good or not."""
    if not message.has_content():
        return 0
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def read_answer(content: RecordDict, client: int, server: Server, turn: Round, limits: Limits) -> Upload:
    """Read a client's answer, or raise a WireError."""
    about = numbers(content)
    if about.get("client") != client:
        raise WireError(f"the reply is from client {_short(about.get('client'))}, the node is client {client}")
    if about.get("round") != turn.number:
        raise WireError(f"the reply is for round {_short(about.get('round'))}, expected {turn.number}")
    examples = _examples(about, limits)
    loss, tested = about.get("loss"), about.get("tested")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise WireError("the reply has no finite loss")
    _check_size("loss", loss, limits)
    if not _whole(tested, 0, 2**62):
        raise WireError("the reply does not say how many test examples there are")
    mean, largest = about.get("tv_mean"), about.get("tv_max")
    apart = (mean, largest) if _probability(mean) and _probability(largest) else None
    layers, kept = list(turn.up.gates), about.get("floored", [])
    if not isinstance(kept, list) or not all(_whole(i, 0, len(layers) - 1) for i in kept):
        raise WireError("the reply names layers that the model does not have")
    return Upload(
        message=server.read(turn, client, _unwrap(content)),
        examples=examples,
        loss=loss,
        scores=_scores(about, server, limits) if tested else {},
        disagreement=apart,
        floored=tuple(layers[i] for i in kept),
        forgot=about.get("forgot") == 1,
    )


def _scores(about: dict[str, Any], server: Server, limits: Limits) -> dict[str, float]:
    """Read the scores of a client's hard assignment on its test examples, or raise a WireError; skip other names."""
    found = {name: about[f"local_{name}"] for name in server.scores if f"local_{name}" in about}
    for name, value in found.items():
        if not isinstance(value, float) or not math.isfinite(value) or (name == "accuracy" and not 0 <= value <= 1):
            raise WireError(f"the reply's {name} on its test examples is impossible")
        _check_size(f"{name} on its test examples", value, limits)
    return found


def _check_size(what: str, value: float, limits: Limits) -> None:
    """Refuse a number that would drown all others in the record's mean."""
    if not abs(value) <= limits.max_loss:
        raise WireError(f"the reply's {what} is {value:g}, beyond max-loss={limits.max_loss:g}")


def check_introduction(content: RecordDict, server: Server, turn: Round, limits: Limits) -> tuple[int, int]:
    """Return which client a node says it is and its number of examples, if its model and algorithm are the same."""
    about = numbers(content)
    client = about.get("client")
    if not _whole(client, 0, server.job.clients - 1):
        raise WireError(f"the node says it is client {_short(client)} of {server.job.clients}")
    _check_agreed(content.config_records.get(ABOUT), server)
    for direction, layout in (("down", turn.down), ("up", turn.up)):
        if about.get(direction) != int.from_bytes(layout.fingerprint, "big", signed=True):
            raise WireError("the node has another model")
    return client, _examples(about, limits)


def _check_agreed(theirs: Mapping[str, Any] | None, server: Server) -> None:
    """Refuse a node with another version of fedprior, another algorithm or another setting, and say which."""
    if theirs is None or "fedprior" not in theirs:
        raise WireError("the node does not say what it trains: its fedprior is older than the server's")
    ours = server.job.agreed()
    apart = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
    if apart:
        key, others = str(apart[0])[:40], len(apart) - 1
        more = f" ({others} other settings differ, too)" if others else ""
        raise WireError(f"the node has {key} {_said(theirs.get(key))}, not {_said(ours.get(key))}{more}")


def _said(value: object) -> str:
    return "none" if value is None else str(value).strip('"')[:60]


def _examples(about: Mapping[str, Any], limits: Limits) -> int:
    """Return how many examples a client says it has: at least one, and at most as many as the operator allows."""
    examples = about.get("examples")
    if not _whole(examples, 1, limits.max_examples):
        raise WireError(
            f"the client says it has {_short(examples)} examples, not 1 to max-examples={limits.max_examples}"
        )
    return examples


def _wrap(data: bytes) -> ArrayRecord:
    return ArrayRecord({ARRAY: Array("uint8", (len(data),), "raw", data)})


def _unwrap(content: RecordDict) -> bytes:
    """Return the bytes of a message. `wire.decode` reads them and knows how many there must be."""
    records = content.array_records
    if list(records) != [WIRE] or list(records[WIRE]) != [ARRAY]:
        raise WireError("the message does not hold exactly one array")
    array = records[WIRE][ARRAY]
    if (array.dtype, array.stype, tuple(array.shape)) != ("uint8", "raw", (len(array.data),)):
        raise WireError("the message's array does not hold raw bytes")
    return bytes(array.data)


def _whole(value: object, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _probability(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and 0 <= value <= 1


def _short(value: object) -> str:
    return repr(value)[:40]
