"""Each check of what a foreign machine says, on its own: one field is wrong and everything else is right."""

import math

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from local_grid import LocalGrid

from fedprior import RunError, WireError
from fedprior.flower import HardEM, Limits, Server, messages
from fedprior.flower.memory import check_run
from fedprior.flower.messages import ABOUT, ARRAY, NUMBERS, WIRE
from fedprior.flower.node import Node, Order

RUN = "0123456789abcdef"


@pytest.fixture
def exchange(make_job, tmp_path):
    """A server in its first round, and client 1's honest answer and introduction."""
    job = make_job("fedsparse")
    server = Server.new(job, RUN)
    turn = server.begin()
    node = Node.new(job, 1, job.part(1), tmp_path)
    answer = node.respond(Order(server.packet(turn, 1), 1, RUN, 0))
    return server, turn, messages.write_answer(answer), messages.write_introduction(node)


def changed(content: RecordDict, **wrong: object) -> RecordDict:
    return RecordDict({WIRE: content[WIRE], NUMBERS: MetricRecord({**content[NUMBERS], **wrong})})


def test_an_honest_answer_is_read(exchange):
    server, turn, content, _ = exchange
    upload = messages.read_answer(content, 1, server, turn, Limits())
    assert math.isfinite(upload.loss)
    assert upload.examples == server.job.data.train.size(1)
    assert 0 <= upload.scores["accuracy"] <= 1
    assert math.isfinite(upload.scores["loss"])
    assert upload.disagreement is not None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"client": 0}, {"client": 2}, {"round": 0}, {"round": 2}),
        *({"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}, {"loss": 1}),
        *({"loss": 1e308}, {"loss": -1.1e6}, {"local_loss": 1e308}, {"local_loss": -1.1e6}),
        *({"tested": -1}, {"tested": 2**62 + 1}, {"tested": 1.0}),
        *({"local_accuracy": -0.1}, {"local_accuracy": 1.1}, {"local_accuracy": math.nan}, {"local_accuracy": 1}),
        *({"local_loss": math.nan}, {"local_loss": math.inf}, {"local_loss": 3}),
        *({"floored": [-1]}, {"floored": [2]}, {"floored": [0.0]}, {"floored": 1}),
        *({"examples": 0}, {"examples": -3}, {"examples": 101}, {"examples": 5.0}),
    ],
    ids=str,
)
def test_one_wrong_number_is_refused(exchange, wrong):
    """The model has two gated layers; the server allows a hundred examples."""
    server, turn, content, _ = exchange
    assert len(turn.up.gates) == 2
    limits = Limits(max_examples=100)
    assert messages.read_answer(changed(content, floored=[0, 1], examples=100), 1, server, turn, limits)
    with pytest.raises(WireError):
        messages.read_answer(changed(content, **wrong), 1, server, turn, limits)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, 7.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["tv_mean", "tv_max"])
def test_a_missing_distance_of_gates_is_left_out(exchange, name, wrong):
    server, turn, content, _ = exchange
    assert messages.read_answer(changed(content, **{name: wrong}), 1, server, turn, Limits()).disagreement is None


def test_booleans_are_not_accepted_as_integers():
    assert messages._whole(1, 0, 2)
    assert not messages._whole(True, 0, 2)
    assert not messages._whole(1.0, 0, 2)
    assert [messages._whole(value, 3, 5) for value in range(1, 8)] == [False, False, True, True, True, False, False]


def test_only_one_array_of_raw_bytes_is_a_message(exchange):
    server, turn, content, _ = exchange
    good = content[WIRE][ARRAY]
    data = good.data

    def read(records: dict[str, ArrayRecord]) -> object:
        return messages.read_answer(RecordDict({**records, NUMBERS: content[NUMBERS]}), 1, server, turn, Limits())

    assert read({WIRE: ArrayRecord({ARRAY: Array("uint8", (len(data),), "raw", data)})})
    for array in (
        Array("uint8", (len(data),), "numpy.ndarray", data),
        Array("int8", (len(data),), "raw", data),
        Array("uint8", (len(data) - 1,), "raw", data),
        Array("uint8", (1, len(data)), "raw", data),
    ):
        with pytest.raises(WireError, match="raw bytes"):
            read({WIRE: ArrayRecord({ARRAY: array})})
    for records in (
        {WIRE: ArrayRecord({ARRAY: good, "more": good})},
        {WIRE: ArrayRecord({ARRAY: good}), "more": ArrayRecord({ARRAY: good})},
        {WIRE: ArrayRecord({"other": good})},
    ):
        with pytest.raises(WireError, match="exactly one array"):
            read(records)


@pytest.mark.parametrize(
    "wrong", [{"client": -1}, {"client": 6}, {"client": 1.0}, {"down": 5}, {"up": 5}, {"examples": 0}], ids=str
)
def test_an_introduction_with_one_mistake_is_refused(exchange, wrong):
    server, turn, _, introduction = exchange

    def check(**changed: object) -> tuple[int, int]:
        about = MetricRecord({**introduction[NUMBERS], **changed})
        return messages.check_introduction(RecordDict({**introduction, NUMBERS: about}), server, turn, Limits())

    assert check() == (1, server.job.data.train.size(1))
    with pytest.raises(WireError):
        check(**wrong)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fedprior": "9.9"}, r"the node has fedprior 9\.9, not [0-9.a-z]+$"),
        ({"algorithm": "fedprox"}, r"the node has algorithm fedprox, not fedsparse$"),
        ({"algorithm": "fedprox", "mu": "0.1"}, r"algorithm fedprox, not fedsparse \(1 other settings differ, too\)$"),
        ({"lambda0": "7.0"}, r"the node has lambda0 7\.0, not [0-9.e-]+$"),
        ({"new": "x" * 1000}, r"the node has new x{60}, not none$"),
        (None, "its fedprior is older than the server's"),
    ],
    ids=str,
)
def test_another_version_or_setting_is_one_line_that_says_which(exchange, changed, words):
    server, turn, _, introduction = exchange
    about = {} if changed is None else {ABOUT: ConfigRecord({**introduction[ABOUT], **changed})}
    with pytest.raises(WireError, match=words) as refusal:
        messages.check_introduction(RecordDict({NUMBERS: introduction[NUMBERS], **about}), server, turn, Limits())
    assert "\n" not in str(refusal.value)


def test_the_two_fingerprints_of_an_introduction_are_not_the_same(exchange):
    _, _, _, introduction = exchange
    assert introduction[NUMBERS]["down"] != introduction[NUMBERS]["up"]


@pytest.mark.parametrize(
    "wrong",
    [{"round": 0}, {"round": -1}, {"round": 2**32}, {"accepted": -1}, {"accepted": 2**32}, {"run": "../x"}],
    ids=str,
)
def test_an_order_with_one_mistake_is_refused_by_the_client(wrong):
    content = messages.write_order(Order(b"packet", 1, RUN, 0))
    assert messages.read_order(content) == Order(b"packet", 1, RUN, 0)
    about = ConfigRecord({**content[ABOUT], **wrong})
    with pytest.raises(WireError):
        messages.read_order(RecordDict({WIRE: content[WIRE], ABOUT: about}))


@pytest.mark.parametrize("run", [RUN + "/..", RUN + "0", RUN[:-1], RUN.upper(), "", None, 7, RUN + "\n"])
def test_a_runs_name_is_exactly_sixteen_digits(run):
    assert check_run(RUN) == RUN
    with pytest.raises(WireError):
        check_run(run)


def test_text_from_foreign_machines_becomes_one_printable_line(exchange):
    server, _, _, _ = exchange
    strategy = HardEM(server, Limits())
    strategy._fault(7, 1, WireError("red \x1b[31m\n\x07 bell " + "x" * 1000))
    fault = strategy.turn.faults[-1]
    assert fault["what"].startswith("red ?[31m ? bell xxx")
    assert fault["what"].isprintable()
    assert len(fault["what"]) <= 300
    assert (fault["node"], fault["client"]) == ("7", 1)


def test_an_answer_to_an_earlier_question_is_left_out(make_job, quick, tmp_path):
    """An honest client's honest answer to a message that is no longer waited for."""
    job = make_job("fedavg", {"clients_per_round": 3})
    strategy, grid = HardEM(Server.new(job, RUN), quick), LocalGrid(job, tmp_path)
    strategy.meet(grid, job.clients)
    orders = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    replies = list(strategy.exchange(grid, orders))
    assert len(replies) == 3
    forgotten = strategy.roster.clients[strategy.sent[0].metadata.dst_node_id]
    strategy.sent = strategy.sent[1:]
    strategy.aggregate_train(1, replies)
    assert set(strategy.good) == set(strategy.cohort) - {forgotten}
    assert any("not requested" in fault["what"] for fault in strategy.turn.faults)


def test_too_few_good_replies_are_not_accepted(make_job, tmp_path):
    """One of six clients answers well, two are needed."""
    job = make_job("fedavg", {"clients_per_round": 6})

    def tamper(order, reply):
        own = reply.has_content() and (NUMBERS not in reply.content or reply.content[NUMBERS].get("round") is None)
        honest = own or reply.content[NUMBERS]["client"] == 4
        return [reply if honest else Message(Error(code=2, reason="boom"), reply_to=order)]

    limits = Limits(round_seconds=0.05, start_seconds=0.2, poll_seconds=0.001, min_replies=2, attempts=2)
    strategy = HardEM(Server.new(job, RUN), limits)
    with pytest.raises(RunError, match="1 good replies"):
        strategy.run_round(LocalGrid(job, tmp_path, tamper), 1)
    assert list(strategy.good) == [4]
    assert strategy.server.round == 0
