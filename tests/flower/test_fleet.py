"""A fleet that nobody watches: devices that change, devices that are of no use, runs that are resumed by default."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from flwr.app import Context, RecordDict
from local_grid import LocalGrid, Slow
from test_faults import with_payload

import fedprior
from fedprior import RunError, SettingError, WireError
from fedprior.core import trees
from fedprior.flower import HardEM, Limits, Server, client_app, server_app
from fedprior.flower.deploy import APP
from fedprior.flower.job import parse_settings
from fedprior.flower.resumed import OWN
from fedprior.flower.roster import ASK_AGAIN, LONGEST, Roster, read_devices

RUN = "0123456789abcdef"
LIMITS = {"round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 6}
DEFAULTS = {
    "algorithm": "fedsparse",
    "settings": "rounds=2",
    "out": "",
    "resume": "",
    "rounds": 0,
    "devices": "",
    **LIMITS,
}
"""An app's run config, of which `flwr run` changes some keys."""


@pytest.fixture
def flwr_run(make_job, tmp_path):
    """Flower's command: both halves of an app get the app's defaults and what is typed."""

    def job(config):
        settings = {key: int(value) for key, value in parse_settings(config).items() if key != "device"}
        return make_job(config["algorithm"], settings, local_optimiser="SGD(lr=0.1)")

    def run(rounds_before_the_end=None, **typed):
        config = DEFAULTS | {key.replace("_", "-"): value for key, value in typed.items()}
        grid = LocalGrid(job(config), tmp_path)
        grid.app, context = client_app(job, lambda job, context: job.part(grid.nodes[context.node_id])), grid.context
        grid.context = lambda node: Context(1, node, context(node).node_config, RecordDict(), config)
        if rounds_before_the_end is not None:
            push, left = grid.push_messages, [rounds_before_the_end]

            def pushed(messages):
                left[0] -= any(message.metadata.message_type == "train" for message in messages)
                if left[0] < 0:
                    raise KeyboardInterrupt
                return push(messages)

            grid.push_messages = pushed
        server_app(job)(grid, Context(1, 1, {}, RecordDict(), config))

    return run


def records(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_resumed_run_takes_everything_from_its_folder(flwr_run, tmp_path):
    """A command that resumes names nothing but the folder; the app's defaults are another algorithm's."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    asked = {"algorithm": "fedavg", "settings": "rounds=4; clients_per_round=2"}
    flwr_run(out=str(whole), **asked)
    with pytest.raises(KeyboardInterrupt):
        flwr_run(2, out=str(run), **asked)
    assert len(records(run)) == 2
    flwr_run(resume=str(run))
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_a_resumed_run_may_get_more_rounds_and_not_fewer(flwr_run, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    flwr_run(out=str(run), settings="rounds=3; evaluate_every=1")
    with pytest.raises(RunError, match=r"was started for 3 rounds: rounds may be more, not 2"):
        flwr_run(resume=str(run), rounds=2)
    assert len(records(run)) == 3
    with pytest.raises(KeyboardInterrupt):
        flwr_run(1, resume=str(run), rounds=5)
    assert not (run / "summary.json").exists()  # it is not finished any more
    flwr_run(resume=str(run))  # and still goes on to 5
    assert tomllib.loads((run / "config.toml").read_text())["run"]["rounds"] == 5
    flwr_run(out=str(whole), rounds=5, settings="evaluate_every=1")
    assert (run / "rounds.jsonl").read_bytes() == (whole / "rounds.jsonl").read_bytes()
    with pytest.raises(SettingError, match="rounds must be a whole number"):
        flwr_run(resume=str(run), rounds=-1)


def test_the_app_has_every_key_that_a_command_may_set():
    """Flower refuses keys that the app does not list. Nobody sets how often the server looks."""
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config.keys() == OWN - {"poll-seconds"} | {"task", "algorithm", "settings", "devices"}
    assert Limits.of(config) == Limits()


@pytest.mark.parametrize("kept", ["{", "[]", '{"task": [1]}', "[" * 10_000], ids=("cut", "list", "nested", "deep"))
def test_a_damaged_config_is_one_clear_error(flwr_run, tmp_path, kept):
    run = tmp_path / "run"
    flwr_run(out=str(run), settings="rounds=1")
    lines = (run / "config.toml").read_text().splitlines()
    changed = [f"config = {json.dumps(kept)}" if line.startswith("config =") else line for line in lines]
    assert changed != lines
    (run / "config.toml").write_text("\n".join(changed))
    with pytest.raises(RunError, match="its run config cannot be read"):
        flwr_run(resume=str(run))


class Renumbered(LocalGrid):
    """Device 1003 is started again as client 5 in the first round, while client 5 leaves."""

    def pull_messages(self, message_ids):
        if any(self.waiting[name].metadata.message_type == "train" for name in message_ids if name in self.waiting):
            self.nodes.pop(1005, None)
            self.nodes[1003] = 5
        return super().pull_messages(message_ids)


def test_a_device_with_another_number_is_greeted_again(make_job, quick, tmp_path):
    job, found = make_job("fedavg", {"clients_per_round": 6, "rounds": 3}), []
    HardEM(Server.new(job, RUN), quick, found.append).start(Renumbered(job, tmp_path))
    assert [sorted(record["clients"]) for record in found] == [[0, 1, 2, 4], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]]
    whats = {fault["node"]: fault["what"] for fault in found[0]["faults"]}
    assert whats == {"1003": "the reply is from client 5, the node is client 3", "1005": "no reply in 0.05 s"}
    assert "faults" not in found[2]


def test_an_upgraded_device_is_greeted_again(make_job, clock, quick, tmp_path):
    """It had another model when it first introduced itself; after a while it has the right one."""
    job, other, found = make_job("fedavg", {"clients_per_round": 6, "rounds": 3}), make_job("fedsparse"), []
    honest, foreign = client_app(lambda config: job), client_app(lambda config: other)

    class Grid(LocalGrid):
        def pull_messages(self, message_ids):
            replies = []
            for name in message_ids:
                order = self.waiting.get(name)
                old = order is not None and order.metadata.dst_node_id == 1001 and clock.now < 2 * ASK_AGAIN
                self.app = foreign if old else honest
                replies += super().pull_messages([name])
            return replies

    def keep(record):
        found.append(record)
        clock.now += 3 * ASK_AGAIN

    HardEM(Server.new(job, RUN), quick, keep).start(Grid(job, tmp_path))
    assert [1 in record["clients"] for record in found] == [False, True, True]
    assert [fault["node"] for fault in found[0]["faults"]] == ["1001"]


def test_a_device_of_no_use_is_quarantined_and_named(make_job, clock, tmp_path):
    job, found, orders = make_job("fedavg", {"clients_per_round": 6, "rounds": 6}), [], []
    limits = Limits(round_seconds=0.05, start_seconds=0.2, poll_seconds=0.001, quarantine_after=3, wait_for=6)

    def garbage(order, reply):
        if order.metadata.message_type == "train" and order.metadata.dst_node_id == 1002:
            orders.append(order)
            return [with_payload(order, reply, b"garbage")]
        return [reply]

    def keep(record):
        found.append(record)
        clock.now += 10 * ASK_AGAIN

    HardEM(Server.new(job, RUN), limits, keep).start(LocalGrid(job, tmp_path, garbage))
    assert len(orders) == 3
    assert [record.get("quarantined") for record in found] == [
        *(None, None),
        [{"node": "1002", "client": 2}],
        *(None, None, None),
    ]
    assert [len(record.get("faults", ())) for record in found] == [1, 1, 1, 0, 0, 0]
    assert all(sorted(record["clients"]) == [0, 1, 3, 4, 5] for record in found)


# ---------------------------------------------------------------------- who speaks for whom


@pytest.mark.parametrize("bound", [False, True])
def test_a_device_cannot_speak_for_another_if_keys_are_bound_to_numbers(make_job, quick, tmp_path, bound):
    """Node 999 is registered, and says before client 2 comes that it is client 2. So does node 1005 after a round."""
    job, found, numbers = make_job("fedavg", {"clients_per_round": 6, "rounds": 2}), [], {}
    grid = LocalGrid(job, tmp_path)
    grid.nodes[999] = 2

    def keep(record):
        found.append(record)
        grid.nodes[1005] = 2

    if bound:
        numbers = read_devices("; ".join(f"{1000 + i}={i}" for i in range(6)), 6)
    HardEM(Server.new(job, RUN), quick, keep, bound=numbers).start(grid)
    whats = {fault["node"]: fault["what"] for record in found for fault in record["faults"]}
    if bound:
        assert whats["999"] == "the node says it is client 2, but is not one of `devices`"
        assert whats["1005"] == "the reply is from client 2, the node is client 5"
        assert [sorted(record["clients"]) for record in found] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]
    else:
        assert whats["1002"] == "another node is already this client"


def test_a_key_is_that_of_one_client():
    roster = Roster(5, {7: 0, 8: 1})
    roster.check(7, 0)
    with pytest.raises(WireError, match="says it is client 1, but its key is that of client 0"):
        roster.check(7, 1)
    with pytest.raises(WireError, match="is not one of `devices`"):
        roster.check(9, 1)


@pytest.mark.parametrize("text", ["7", "7=x", "x=0", "7=0; 7=1", "7=0; 8=0", "7=6", "7=-1", "=0"])
def test_devices_that_cannot_be_are_refused(text):
    with pytest.raises(SettingError, match="devices"):
        read_devices(text, 6)


def test_a_resumed_run_keeps_its_devices_until_others_are_named(flwr_run, tmp_path):
    run, all_of_them = tmp_path / "run", "; ".join(f"{1000 + i}={i}" for i in range(6))
    flwr_run(out=str(run), devices=all_of_them, settings="rounds=1")
    flwr_run(resume=str(run), rounds=2)
    assert "faults" not in records(run)[1]
    swapped = all_of_them.replace("1004=4", "2004=4")
    flwr_run(resume=str(run), rounds=3, devices=swapped)
    assert [fault["node"] for fault in records(run)[2]["faults"]] == ["1004"]
    flwr_run(resume=str(run), rounds=4, devices=all_of_them)
    assert "faults" not in records(run)[3]


# ---------------------------------------------------------------------- those who are slow


def test_a_round_closes_early_and_names_the_stragglers(make_job, clock, tmp_path):
    job, found = make_job("fedavg", {"clients_per_round": 6, "rounds": 2}), []
    limits = Limits(round_seconds=100, start_seconds=1, poll_seconds=0.01, wait_for=6, aggregate_at=0.6)
    HardEM(Server.new(job, RUN), limits, found.append).start(Slow(job, tmp_path, {2: 200, 5: 200}))
    assert [sorted(record["clients"]) for record in found] == [[0, 1, 3, 4]] * 2
    assert [sorted(record["stragglers"]) for record in found] == [[2, 5]] * 2
    assert all("faults" not in record for record in found)
    assert clock.now < 1  # nobody waited for them


def test_without_early_close_a_round_waits(make_job, clock, tmp_path):
    job, found = make_job("fedavg", {"clients_per_round": 6, "rounds": 1}), []
    limits = Limits(round_seconds=100, start_seconds=1, poll_seconds=0.01, wait_for=6)
    HardEM(Server.new(job, RUN), limits, found.append).start(Slow(job, tmp_path, {2: 200, 5: 200}))
    assert sorted(found[0]["clients"]) == [0, 1, 2, 3, 4, 5]
    assert "stragglers" not in found[0]
    assert clock.now > 1


def test_more_clients_than_the_cohort_are_asked_and_the_slowest_left_out(make_job, clock, tmp_path):
    job, found, slow = make_job("fedavg", {"clients_per_round": 4, "rounds": 1}), [], [1, 2]
    limits = Limits(round_seconds=100, start_seconds=1, poll_seconds=0.01, over_select=0.5)
    HardEM(Server.new(job, RUN), limits, found.append).start(Slow(job, tmp_path, dict.fromkeys(slow, 200)))
    assert sorted(found[0]["clients"]) == [0, 3, 4, 5]
    assert sorted(found[0]["stragglers"]) == slow
    assert clock.now < 1


def test_a_straggler_takes_part_again_when_it_has_finished(make_job, clock, tmp_path):
    job, found = make_job("fedavg", {"clients_per_round": 6, "rounds": 2}), []
    limits = Limits(round_seconds=100, start_seconds=1, poll_seconds=0.01, wait_for=6, aggregate_at=0.6)
    grid = Slow(job, tmp_path, {2: 200})

    def keep(record):
        found.append(record)
        grid.slow = {}

    HardEM(Server.new(job, RUN), limits, keep).start(grid)
    assert found[0]["stragglers"] == [2]
    assert sorted(found[1]["clients"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"aggregate_at": 0.0}, "aggregate-at must be above 0"),
        ({"aggregate_at": 1.1}, "aggregate-at must be above 0"),
        ({"over_select": -0.1}, "over-select must not be negative"),
        ({"aggregate_at": 0.3, "min_replies": 3}, "closes a round with 2 replies, but min-replies is 3"),
        ({"over_select": 0.2, "cohort": 6}, "over-select has no effect: a cohort has all 6 clients"),
        ({"over_select": 0.2, "noise_multiplier": 1.0}, "a private run takes no over-select"),
        ({"aggregate_at": 0.9, "noise_multiplier": 1.0}, "a private run .* no aggregate-at below 1"),
    ],
    ids=str,
)
def test_limits_that_do_not_fit_are_refused(make_job, limits, words):
    settings = {"clients_per_round": limits.get("cohort", 5), "noise_multiplier": limits.get("noise_multiplier")}
    job = make_job("fedavg", settings)
    with pytest.raises(SettingError, match=words):
        Limits(**{name: limits[name] for name in limits.keys() - {"cohort", "noise_multiplier"}}).check(job)


def test_shares_of_a_cohort_are_whole_clients():
    """0.7 · 10 is a little more than 7 in floating point."""
    assert [Limits(aggregate_at=share).enough(10) for share in (0.7, 0.75, 1.0, 0.01)] == [7, 8, 10, 1]
    assert [Limits(over_select=share).asked(10) for share in (0.0, 0.1, 0.3, 0.31)] == [10, 11, 13, 14]
    assert Limits(aggregate_at=0.2).needed(10) == 2
    assert Limits().needed(10) == 5


# ---------------------------------------------------------------------- the roster


def test_a_refused_node_waits_longer_each_time():
    roster, now, waits = Roster(5), 0.0, []
    for _ in range(8):
        assert roster.see([7], now) == [7]
        roster.turn_away(7, now)
        waits.append(roster.again[7] - now)
        assert roster.see([7], roster.again[7] - 1e-6) == []
        now = roster.again[7]
    assert waits == [min(ASK_AGAIN * 2**i, LONGEST) for i in range(8)]
    assert roster.quarantined == set()
    roster.welcome(7, 0)
    assert roster.see([7], now) == []
    roster.see([], now)
    assert roster.see([7], now) == [7]  # it left and is back


def test_useless_answers_in_a_row_lead_to_quarantine_and_a_good_one_does_not():
    roster, now = Roster(3), 0.0
    for useful in (False, False, True, False, False):
        roster.welcome(7, 0)
        if useful:
            roster.trust(7)
        else:
            assert not roster.refuse(7, now)
            assert 7 not in roster.clients
    roster.see([], now)  # leaving and coming back clears nothing
    assert roster.refuse(7, now)
    assert roster.see([7], now + 10 * LONGEST) == []
    patient = Roster(0)
    assert not any(patient.refuse(7, now) for _ in range(50))


def test_the_first_useless_answer_is_followed_by_a_greeting_at_once():
    roster = Roster(5)
    roster.welcome(7, 0)
    roster.refuse(7, 100.0)
    assert roster.see([7], 100.0) == [7]
    roster.refuse(7, 100.0)
    assert roster.see([7], 100.0) == []
    assert roster.see([7], 100.0 + ASK_AGAIN) == [7]


def test_a_greeting_tells_what_a_resumed_run_was_started_with(make_job, quick, tmp_path):
    """A device takes that over its own run config. A new run's devices are told nothing."""
    seen = []

    class Grid(LocalGrid):
        def push_messages(self, messages):
            seen.extend("asked" in message.content for message in messages)
            return super().push_messages(messages)

    def at_the_device(config):
        assert "algorithm" not in config or config["algorithm"] == "fedavg"
        return job

    job = make_job("fedavg", {"rounds": 1})
    grid = Grid(job, tmp_path)
    grid.app = client_app(at_the_device)
    HardEM(Server.new(job, RUN), quick, asked={"algorithm": "fedavg", "rounds": 1}).start(grid)
    assert seen == [True] * (6 + 3)
    HardEM(Server.new(job, RUN), quick).start(grid)
    assert seen[9:] == [False] * (6 + 3)


# ---------------------------------------------------------------------- uploads that are folded in
SCRIPT = Path(fedprior.__file__).parents[2] / "scripts" / "flower_memory.py"


def peaks(*options):
    """The memory of a server's process after one round and after another with more uploads."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--megabytes", "8", *options], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(sys.platform == "win32", reason="the peak of a process")
def test_the_servers_memory_does_not_grow_with_the_cohort():
    """A dozen more uploads of 8 MB: kept, they take 96 MB more."""
    few, many = peaks("--uploads", "4", "16", "--keep", "16")
    assert few["folds"]
    assert many["folds"]
    assert many["peak_mb"] - few["peak_mb"] < 3 * 8


@pytest.mark.parametrize("name", ["fedavg", "fedsparse", "feddrop", "fednarrow+scaffold", "fedadam"])
def test_a_run_whose_uploads_are_folded_in_is_the_same_run(name, make_job, quick, tmp_path):
    """In double precision, so that the two ways of adding up differ in its last bits only."""
    job, found = make_job(name, {"clients_per_round": 4}, torch.float64, local_optimiser="SGD(lr=0.1)"), []
    for number, keep in enumerate((quick.keep_megabytes, 1e-6)):
        kept, server = [], Server.new(job, RUN)
        limits = replace(quick, keep_megabytes=keep)
        HardEM(server, limits, kept.append).start(LocalGrid(job, tmp_path / str(number)))
        assert server.folds == bool(number)
        found.append((kept, dict(trees.leaves(server.state))))
    for (stacked, state), (folded, other) in [found]:
        assert [record["clients"] for record in stacked] == [record["clients"] for record in folded]
        assert [record["bytes_up"] for record in stacked] == [record["bytes_up"] for record in folded]
        for path, value in state.items():
            torch.testing.assert_close(other[path], value, rtol=1e-9, atol=1e-9)


def test_an_algorithm_that_needs_all_uploads_says_how_much_that_is(make_job, quick, caplog):
    server = Server.new(make_job("fedmedian", {"clients_per_round": 4}), RUN)
    HardEM(server, replace(quick, keep_megabytes=0))
    assert not server.folds
    assert "fedmedian in closed form is not made of sums: a round needs 4 uploads of 0 MB at once" in caplog.text


def test_a_refused_upload_is_not_folded_in(make_job, quick, tmp_path):
    job, found = make_job("fedavg", {"clients_per_round": 6, "rounds": 1}, torch.float64), []

    def garbage(order, reply):
        bad = order.metadata.message_type == "train" and order.metadata.dst_node_id == 1002
        return [with_payload(order, reply, reply.content["wire"]["message"].data, loss=1e308) if bad else reply]

    for tamper, clients in ((garbage, range(6)), (None, [0, 1, 3, 4, 5])):
        server = Server.new(job, RUN)
        HardEM(server, replace(quick, keep_megabytes=0)).start(LocalGrid(job, tmp_path, tamper, clients))
        found.append(dict(trees.leaves(server.state)))
    for path, value in found[0].items():
        torch.testing.assert_close(found[1][path], value, rtol=1e-12, atol=1e-12)
