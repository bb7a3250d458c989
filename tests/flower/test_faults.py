"""Whatever nodes send, lose or refuse, the round continues with the others, and everything is counted."""

import copy
import itertools
import math
import random
import struct
import zlib
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import httpx
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from local_grid import LocalGrid

import fedprior
from fedprior import RunError, WireError, wire
from fedprior.core import trees
from fedprior.core.settings import Settings
from fedprior.flower import HardEM, Job, Limits, Server, messages
from fedprior.flower.memory import check_run
from fedprior.flower.messages import ARRAY, NUMBERS, WIRE

RUN = "0123456789abcdef"


def with_payload(order, reply, data, **about):
    record = MetricRecord({**reply.content[NUMBERS], **about})
    array = Array("uint8", (len(data),), "raw", bytes(data))
    return Message(RecordDict({WIRE: ArrayRecord({ARRAY: array}), NUMBERS: record}), reply_to=order)


def payload(reply):
    return reply.content[WIRE][ARRAY].data


def flipped(order, reply, draw):
    data = bytearray(payload(reply))
    for _ in range(draw.randint(1, 5)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return [with_payload(order, reply, data)] if bytes(data) != payload(reply) else flipped(order, reply, draw)


def of_another_round(order, reply, draw):
    return [with_payload(order, reply, payload(reply), round=draw.randint(2, 9))]


def not_finite(order, reply, draw):
    """A message whose header and checksum are right, and whose numbers are not."""
    data = bytearray(payload(reply))
    data[-4:] = torch.tensor(draw.choice([math.nan, math.inf, -math.inf])).numpy().tobytes()
    head, body = bytes(data[: wire.HEADER_BYTES - 4]), bytes(data[wire.HEADER_BYTES :])
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(head)))
    return [with_payload(order, reply, head + checksum + body)]


def not_finite_scale(order, reply, draw):
    """The same for a rounded message, whose first scale follows its sixteen gates."""
    data = bytearray(payload(reply))
    data[26:30] = torch.tensor(draw.choice([math.nan, math.inf, -1.0])).numpy().tobytes()
    head, body = bytes(data[: wire.HEADER_BYTES - 4]), bytes(data[wire.HEADER_BYTES :])
    return [with_payload(order, reply, head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body)]


def wrong_records(order, reply, draw):
    array = Array("float32", (1,), "numpy.ndarray", b"\x93NUMPY" + draw.randbytes(20))
    contents = [
        RecordDict(),
        RecordDict({WIRE: reply.content[WIRE]}),
        RecordDict({NUMBERS: reply.content[NUMBERS]}),
        RecordDict({WIRE: reply.content[NUMBERS], NUMBERS: reply.content[WIRE]}),
        RecordDict({WIRE: ArrayRecord({ARRAY: array}), NUMBERS: reply.content[NUMBERS]}),
        RecordDict({WIRE: ArrayRecord({"other": array, ARRAY: array}), NUMBERS: reply.content[NUMBERS]}),
    ]
    return [Message(draw.choice(contents), reply_to=order)]


def wrong_numbers(order, reply, draw):
    wrong = draw.choice(
        [
            {"loss": math.nan},
            {"loss": 3},
            {"local_accuracy": -0.1},
            {"local_accuracy": 1.1},
            {"local_accuracy": 1},
            {"local_loss": math.nan},
            {"client": 99},
            {"client": 0.5},
            {"floored": [77]},
            {"tested": [1, 2]},
            {"examples": 0},
            {"examples": 1_000_001},
            {"examples": 5.0},
        ]
    )
    return [with_payload(order, reply, payload(reply), **wrong)]


KINDS = {
    "flipped bits": flipped,
    "cut short": lambda o, r, draw: [with_payload(o, r, payload(r)[: draw.randrange(len(payload(r)))])],
    "too long": lambda o, r, draw: [with_payload(o, r, payload(r) + draw.randbytes(draw.randint(1, 9)))],
    "oversized": lambda o, r, draw: [with_payload(o, r, payload(r) + bytes(10**6))],
    "garbage": lambda o, r, draw: [with_payload(o, r, draw.randbytes(draw.randint(0, 400)))],
    "another round": of_another_round,
    "not finite": not_finite,
    "wrong records": wrong_records,
    "wrong numbers": wrong_numbers,
    "an error": lambda o, r, draw: [Message(Error(code=2, reason="boom"), reply_to=o)],
    "nothing": lambda o, r, draw: [],
    "the packet itself": lambda o, r, draw: [with_payload(o, r, payload(o))],
}


def same(one, other):
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(trees.leaves(one), trees.leaves(other), strict=True))


@pytest.mark.parametrize(("precision", "count"), [("float32", 1000), ("int8/int4", 240)])
def test_a_thousand_corrupted_replies(precision, count, make_job, quick, tmp_path):
    """One client is hostile in every possible way: the model is the other client's, and every fault is counted."""
    job = make_job("fedsparse", {"clients_per_round": 2, "wire": precision}, local_optimiser="SGD(lr=0.1)")
    kinds = KINDS if precision == "float32" else {**KINDS, "not finite": not_finite_scale}
    strategy, grid, draw = HardEM(Server.new(job, RUN), quick), LocalGrid(job, tmp_path), random.Random(0)
    strategy.meet(grid, 6)
    orders = strategy.configure_train(1, ArrayRecord(), None, grid)
    grid.push_messages(orders)
    reply, honest = (grid.app(order, grid.context(order.metadata.dst_node_id)) for order in orders)
    (hostile, client), clients = strategy.cohort, dict(strategy.roster.clients)
    for i, kind in zip(range(count), itertools.cycle(kinds), strict=False):
        strategy.sent, strategy.good, strategy.roster.clients = orders, {}, dict(clients)
        strategy.aggregate_train(1, [*kinds[kind](orders[0], reply, draw), honest])
        assert list(strategy.good) == [client], kind
        assert len(strategy.turn.faults) == i + 1, kind
        assert strategy.turn.faults[-1]["client"] == hostile
        assert strategy.turn.faults[-1]["node"] == str(1000 + hostile)
    strategy._close()

    twin = Server.new(job, RUN)
    turn = twin.begin()
    twin.close(turn, {client: messages.read_answer(honest.content, client, twin, turn, quick)}, evaluate=False)
    assert same(strategy.server.state, twin.state)


@pytest.mark.parametrize("number", [3e38, 1e4])
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("folded", [False, True])
def test_numbers_that_are_finite_but_far_away_are_left_out(
    number, precision, folded, make_job, quick, tmp_path, caplog
):
    """One device sends them in every round, in messages that are right: the run is that of the others, and says who.

    Also where the server folds in each upload when it arrives.
    """
    quick = replace(quick, keep_megabytes=0 if folded else quick.keep_megabytes)
    job = make_job("fedavg", {"clients_per_round": 6, "wire": precision})

    def tamper(order, reply):
        if order.metadata.dst_node_id != 1004 or order.metadata.message_type != "train":
            return [reply]
        data = bytearray(payload(reply))
        # The last number of the message or, if it is rounded, the first scale.
        place = slice(len(data) - 4, len(data)) if precision == "float32" else slice(24, 28)
        data[place] = struct.pack("<f", number if precision == "float32" else number / 128)
        head, body = bytes(data[: wire.HEADER_BYTES - 4]), bytes(data[wire.HEADER_BYTES :])
        return [with_payload(order, reply, head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body)]

    records, strategy = [], HardEM(Server.new(job, RUN), quick, lambda record: records.append(record))
    strategy.start(LocalGrid(job, tmp_path / "hostile", tamper))
    for record in records:
        (fault,) = record["faults"]
        assert fault["client"] == 4
        assert "as far from the server's state as usual" in fault["what"] or "not finite" in fault["what"]
        assert sorted(record["clients"]) == [0, 1, 2, 3, 5]
        assert len(record["examples"]) == 5
        assert fault["what"] in caplog.text
    assert strategy.server.folds == folded
    assert 4 not in strategy.server.accepted
    alone = HardEM(Server.new(job, RUN), replace(quick, min_replies=5))
    alone.start(LocalGrid(job, tmp_path / "alone", clients=[0, 1, 2, 3, 5]))
    for (path, one), (_, other) in zip(
        trees.leaves(strategy.server.state), trees.leaves(alone.server.state), strict=True
    ):
        # Another cohort has another order, and sums of floats depend on it.
        assert path.startswith("usual") or torch.allclose(one, other, rtol=0, atol=1e-6), path


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("times", [6, -6])
def test_a_long_step_back_is_left_out(times, folded, small_task, quick, tmp_path):
    """Six times a device's step is near enough, backwards it is not: also where the server folds in each upload when
    it arrives. This one is never among the first four."""
    quick = replace(quick, keep_megabytes=0 if folded else quick.keep_megabytes)
    task = small_task((16,) * 6)
    chosen = Settings(**{**task.defaults, "rounds": 2, "clients_per_round": 6})
    job = Job("small", task.network, fedprior.algorithm("fedavg", task.network), chosen, 6, task.data, task.data)
    records, strategy = [], HardEM(Server.new(job, RUN), quick, lambda record: records.append(record))

    def tamper(order, reply):
        if order.metadata.dst_node_id != 1000 or order.metadata.message_type != "train":
            return [reply]
        data = bytearray(payload(reply))
        known = torch.cat([value.flatten() for value in strategy.server.state["weights"].values()])
        sent = torch.frombuffer(data, dtype=torch.float32, offset=wire.HEADER_BYTES)
        sent.copy_(known + times * (sent - known))
        head, body = bytes(data[: wire.HEADER_BYTES - 4]), bytes(data[wire.HEADER_BYTES :])
        return [with_payload(order, reply, head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body)]

    strategy.start(LocalGrid(job, tmp_path, tamper))
    assert strategy.server.folds == folded
    left_out = [[fault["client"] for fault in record.get("faults", ())] for record in records]
    assert left_out == [[] if times > 0 else [0]] * 2


def test_duplicate_and_unrequested_replies_are_ignored(make_job, quick, tmp_path):
    job = make_job("fedavg")
    grid = LocalGrid(job, tmp_path, lambda order, reply: [reply, copy.copy(reply)])
    records = []
    HardEM(Server.new(job, RUN), quick, records.append).start(grid)
    for record in records:
        assert len(record["clients"]) == 3
        assert [fault["what"] for fault in record["faults"]] == ["a second reply to the same message"] * 3
    strategy = HardEM(Server.new(job, RUN), quick)
    strategy.meet(grid, 6)
    strategy.configure_train(1, ArrayRecord(), None, grid)
    strategy.sent = []
    stray = Message(RecordDict(), 1000, "train")
    strategy.aggregate_train(1, [stray])
    assert strategy.good == {}
    assert "not requested" in strategy.turn.faults[0]["what"]


def test_a_reply_that_flower_cannot_unpack_does_not_end_the_run(make_job, quick, tmp_path):
    """Flower unpacks replies while they are pulled, and raises whatever the unpacking of foreign bytes raises."""
    job = make_job("fedavg", {"clients_per_round": 6, "rounds": 2})

    class Grid(LocalGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            if any(r.metadata.message_type == "train" and r.metadata.src_node_id == 1002 for r in replies):
                raise ValueError("Mismatch in children object IDs \x1b[31m")
            return replies

    records = []
    HardEM(Server.new(job, RUN), quick, records.append).start(Grid(job, tmp_path))
    for record in records:
        assert sorted(record["clients"]) == [0, 1, 3, 4, 5]
        (fault,) = record["faults"]
        assert (fault["node"], fault["client"]) == ("1002", 2)
        assert "cannot be unpacked" in fault["what"]
        assert fault["what"].isprintable()


def test_a_lost_superlink_is_not_the_nodes_fault(make_job, quick, tmp_path):
    job = make_job("fedavg")

    class Grid(LocalGrid):
        def pull_messages(self, message_ids):
            raise httpx.ReadError("connection reset")

    with pytest.raises(httpx.ReadError):
        HardEM(Server.new(job, RUN), quick).start(Grid(job, tmp_path))


def test_a_reply_counts_for_the_node_that_sent_it(make_job, quick, tmp_path):
    """What a reply says it answers is the sender's word: a node must not be able to speak for another."""
    job = make_job("fedavg", {"clients_per_round": 6, "rounds": 1})
    orders = {}

    def forge(order, reply):
        node = order.metadata.dst_node_id
        if order.metadata.message_type == "train":
            orders[node] = order
            if node == 1004 and len(orders) > 1:
                other = next(order for name, order in orders.items() if name != 1004)
                return [Message(reply.content, reply_to=other)]
        return [reply]

    records = []
    HardEM(Server.new(job, RUN), quick, records.append).start(LocalGrid(job, tmp_path, forge))
    assert sorted(records[0]["clients"]) == [0, 1, 2, 3, 5]
    (fault,) = records[0]["faults"]
    assert (fault["node"], fault["client"]) == ("1004", 4)
    assert "answers another message" in fault["what"]


def test_the_order_of_arrival_does_not_matter(make_job, quick, tmp_path):
    """A sum of floats depends on its order, so it is the cohort's."""
    job = make_job("fedavg", {"clients_per_round": 6})
    strategy, grid = HardEM(Server.new(job, RUN), quick), LocalGrid(job, tmp_path)
    strategy.meet(grid, 6)
    replies = list(strategy.exchange(grid, strategy.configure_train(1, ArrayRecord(), None, grid)))
    strategy.aggregate_train(1, reversed(replies))
    assert list(strategy.good) == strategy.cohort


def test_a_node_that_never_answers_is_not_asked_until_it_greets(make_job, tmp_path):
    job = make_job("fedavg", {"clients_per_round": 6, "rounds": 3})
    limits, orders = Limits(round_seconds=0.1, start_seconds=0.2, poll_seconds=0.001, wait_for=6), []

    class Grid(LocalGrid):
        def pull_messages(self, message_ids):
            alive = {i for i in message_ids if self.waiting[i].metadata.dst_node_id != 1003 or self.count < 8}
            return super().pull_messages(alive)

        def push_messages(self, messages):
            orders.extend(m.metadata.dst_node_id for m in messages if m.metadata.message_type == "train")
            return super().push_messages(messages)

    grid, records = Grid(job, tmp_path), []
    HardEM(Server.new(job, RUN), limits, records.append).start(grid)
    assert [len(record["clients"]) for record in records] == [5, 5, 5]
    assert records[0]["faults"] == [{"node": "1003", "client": 3, "what": "no reply in 0.1 s"}]
    assert orders.count(1003) == 1
    assert "faults" not in records[1]


def test_other_clients_replace_those_that_failed(make_job, quick, tmp_path):
    job = make_job("fedavg", {"clients_per_round": 3, "rounds": 1})
    failed = []

    def first_three_fail(order, reply):
        if order.metadata.message_type == "train" and len(failed) < 3:
            failed.append(order.metadata.dst_node_id - 1000)
            return [Message(Error(code=2, reason="no"), reply_to=order)]
        return [reply]

    records = []
    HardEM(Server.new(job, RUN), quick, records.append).start(LocalGrid(job, tmp_path, first_three_fail))
    assert sorted(records[0]["clients"] + failed) == list(range(6))
    assert len(records[0]["faults"]) == 3


def test_too_few_replies_stop_the_run_and_change_nothing(make_job, quick, tmp_path):
    job = make_job("fedsparse")

    def all_fail(order, reply):
        train = order.metadata.message_type == "train"
        return [Message(Error(code=2, reason="out of memory"), reply_to=order)] if train else [reply]

    server = Server.new(job, RUN)
    before = trees.tree_map(torch.clone, server.state)
    strategy = HardEM(server, quick)
    with pytest.raises(RunError, match=r"round 1 had 0 good replies after 3 attempts, 2 are needed.*resume="):
        strategy.start(LocalGrid(job, tmp_path, all_fail))
    assert server.round == 0
    assert same(server.state, before)
    assert {fault["what"] for fault in strategy.turn.faults} == {"error 2: out of memory"}


def test_too_few_nodes_is_one_clear_error(make_job, tmp_path):
    job = make_job("fedavg")
    limits = Limits(start_seconds=0.05, poll_seconds=0.001)
    with pytest.raises(RunError, match=r"only 1 clients have connected in 0.05 s, 2 are needed"):
        HardEM(Server.new(job, RUN), limits).start(LocalGrid(job, tmp_path, clients=[4]))


def test_nodes_with_another_model_or_number_do_not_take_part(make_job, quick, tmp_path):
    job, other = make_job("fedavg", {"clients_per_round": 6}), make_job("fedsparse")

    class Mixed(LocalGrid):
        def pull_messages(self, message_ids):
            honest = self.app
            foreign = {i for i in message_ids if self.waiting[i].metadata.dst_node_id == 1001}
            self.app = LocalGrid(other, self.folder).app
            replies = super().pull_messages(foreign)
            self.app = honest
            return replies + super().pull_messages(set(message_ids) - foreign)

    grid = Mixed(job, tmp_path)
    grid.nodes |= {1006: 2, 1007: 6}  # one that claims another's number, one whose number is out of range
    records = []
    HardEM(Server.new(job, RUN), quick, records.append).start(grid)
    faults = {fault["node"]: fault["what"] for fault in records[0]["faults"]}
    assert faults["1001"].startswith("the node has algorithm fedsparse, not fedavg")
    assert "this node says it is client 6" in faults["1007"]
    assert faults.keys() & {"1002", "1006"}
    assert [sorted(record["clients"]) for record in records] == [[0, 2, 3, 4, 5]] * 3
    assert all("faults" not in record for record in records[1:])


def test_late_joiners_take_part(make_job, quick, tmp_path):
    job = make_job("fedavg", {"clients_per_round": 6, "rounds": 4})
    grid, records = LocalGrid(job, tmp_path, clients=[0, 1, 2]), []

    def keep(record):
        records.append(sorted(record["clients"]))
        grid.nodes |= {1003: 3} if len(records) == 1 else {}
        if len(records) == 3:
            del grid.nodes[1000]

    HardEM(Server.new(job, RUN), quick, keep).start(grid)
    assert records == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]


def test_clients_always_answer(make_job, tmp_path):
    grid = LocalGrid(make_job("fedavg"), tmp_path)
    for content in (RecordDict(), RecordDict({WIRE: ArrayRecord(), "about": MetricRecord({"round": 1})})):
        reply = grid.app(Message(content, 1000, "train"), grid.context(1000))
        assert reply.has_error()
        assert "server's message" in reply.error.reason
    context = grid.context(1000)
    context.node_config = {}
    reply = grid.app(Message(RecordDict(), 1000, "query"), context)
    assert "--node-config 'partition-id=0'" in reply.error.reason


@pytest.mark.parametrize("run", ["", "../../../../etc", "0123456789abcdeg", "0" * 17, None, 3])
def test_a_run_name_is_never_a_path(run):
    with pytest.raises(WireError):
        check_run(run)
