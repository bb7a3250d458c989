"""Two processes that share a cohort give what one process gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fedprior
from fedprior.core import trees
from fedprior.engines import ranks

TESTS = Path(__file__).parent.parent
CASES = [
    ("fedavg", {"mode": "in-turn"}),
    ("fedsparse", {"mode": "in-turn", "attack": "scale", "attackers": 0.3}),
    ("fedmix", {"mode": "in-turn"}),
    ("fedavg", {"mode": "vectorised", "data": "host"}),
    ("fedsparse+scaffold", {"mode": "vectorised"}),
    ("feddrop", {"mode": "vectorised", "clients_per_round": 1}),
]
"""Cohorts of three, and of one: neither divides by two."""
COUNTED = {"round", "bytes_up", "bytes_down", "global_accuracy", "local_accuracy"}

WORKER = """
import json, sys
from pathlib import Path
from fedprior.engines import ranks
from engines.test_ranks import outcome

with ranks.joined():
    assert ranks.count() == 2
    answers = [outcome(name, settings) for name, settings in json.loads(sys.argv[1])]
    Path(sys.argv[2], f"{ranks.rank()}.json").write_text(json.dumps(answers))
"""


def outcome(name, settings):
    """A run's records and its server in one list of numbers, in float64: a smaller stack may round otherwise."""
    from small_world import small_clients, small_net

    clients = small_clients((5, 11, 2, 8, 9, 3), dtype=torch.float64)
    options = {"rounds": 3, "clients_per_round": 3, "batch_size": 4, "evaluate_every": 2, "device": "cpu"}
    result = fedprior.run(fedprior.own_task(small_net(dtype=torch.float64), clients), name, **{**options, **settings})
    return {
        "records": result.records,
        "server": [x for _, leaf in trees.leaves(result.simulation.server) for x in leaf.double().flatten().tolist()],
    }


def launch(*command):
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, *command], env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_give_the_same_numbers_as_one(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launch(str(script), json.dumps(CASES), str(tmp_path))
    mine, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for (name, settings), one, other in zip(CASES, mine, theirs, strict=True):
        alone = outcome(name, settings)
        assert one["records"] == other["records"]
        assert one["server"] == other["server"], "all ranks took the same M-step"
        for ours, record in zip(one["records"], alone["records"], strict=True):
            counted = record.keys() & COUNTED
            assert {key: ours[key] for key in counted} == {key: record[key] for key in counted}
            assert ours.pop("faults", None) == record.pop("faults", None)
            assert ours == pytest.approx(record, rel=0, abs=1e-9)
        assert one["server"] == pytest.approx(alone["server"], rel=0, abs=1e-9)


def test_the_command_line_under_torchrun_writes_and_prints_once(tmp_path, plain_arithmetic):
    options = ["--rounds", "2", "--clients-per-round", "3", "--set", "local_steps=2", "--device", "cpu"]
    printed = launch("-m", "fedprior", "run", "mnist-mini", *options, "--out", str(tmp_path / "run"))
    assert printed.count(str(tmp_path / "run")) == 1
    result = fedprior.run("mnist-mini", rounds=2, clients_per_round=3, local_steps=2, device="cpu")
    records = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert records == result.records
    model = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    for name, value in result.model.named_parameters():
        assert (model[name] - value).abs().max() < 1e-6


def test_a_single_process_is_one_rank_and_gathers_nothing():
    tree = {"a": {"b": torch.ones(3)}}
    assert (ranks.count(), ranks.rank(), ranks.first()) == (1, 0, True)
    assert ranks.gather(tree, 3) is tree
    assert ranks.own(tree, 3) is tree


@pytest.mark.parametrize(("clients", "count"), [(10, 3), (1, 2), (7, 7), (5, 8)])
def test_shares_cover_a_cohort_in_order(monkeypatch, clients, count):
    monkeypatch.setattr(ranks, "count", lambda: count)
    shares = []
    for rank in range(count):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        shares.append(ranks.share(clients))
    assert len({len(share) for share in shares}) == 1
    assert [place for share in shares for place in share][:clients] == list(range(clients))
