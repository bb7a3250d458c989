"""A server that goes back to a kept checkpoint, and on from there."""

import json
import logging

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

from local_grid import LocalGrid

import fedprior
from fedprior import RunError
from fedprior.flower import messages
from fedprior.flower.apps import serve
from fedprior.report.jumps import kept_rounds

LIMITS = {"round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 6}
FILES = ("rounds.jsonl", "model.safetensors", "clients.bin")


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def records_of(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedsparse"])
def test_a_deployment_that_goes_back_ends_as_one_that_never_did(name, make_job, tmp_path):
    job, run = make_job(name, {"rounds": 6, "keep_every": 2, "keep_checkpoints": 2}), tmp_path / "run"
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    assert kept_rounds(run) == [2, 4, 5, 6]
    whole = contents(run)
    fedprior.rollback(run, 2)
    assert len(records_of(run)) == 2
    assert not (run / "summary.json").exists()
    assert not (run / "model.safetensors").exists()
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})
    assert contents(run) == whole
    assert kept_rounds(run) == [2, 4, 5, 6]


def test_clients_go_back_with_the_server_as_far_as_they_remember(make_job, tmp_path):
    job, run = make_job("scaffold", {"rounds": 6, "clients_per_round": 6, "bound": 0.0}), tmp_path / "run"
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    whole = contents(run)
    fedprior.rollback(run, 5)  # they remember their last two turns
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})
    assert contents(run) == whole
    fedprior.rollback(run, 4)
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "resume": str(run)})
    assert [sorted(record.get("forgot", [])) for record in records_of(run)][3:] == [[], [0, 1, 2, 3, 4, 5], []]


def test_a_checkpoint_of_another_deployment_or_of_a_simulation_is_refused(make_job, tmp_path):
    job, run, other = make_job("fedavg"), tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(folder)})
    place = run / "checkpoints" / "2.safetensors"
    place.unlink()
    place.write_bytes((other / "checkpoints" / "2.safetensors").read_bytes())
    with pytest.raises(RunError, match="does not belong to the run"):
        fedprior.rollback(run, 2)
    task = fedprior.Task("small", job.network, job.data, defaults={"device": "cpu"})
    fedprior.run(task, "fedavg", out=tmp_path / "simulated", rounds=2, keep_every=1)
    place.write_bytes((tmp_path / "simulated" / "checkpoints" / "2.safetensors").read_bytes())
    with pytest.raises(RunError, match="is not a fedprior checkpoint of kind fedprior-flower"):
        fedprior.rollback(run, 2)
    assert len(records_of(run)) == 3


def test_a_private_deployment_does_not_go_back(make_job, tmp_path):
    """Its devices have had the later rounds' models, which have cost their clients some of the budget."""
    job, run = make_job("fedavg", {"noise_multiplier": 1.0}), tmp_path / "run"
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    with pytest.raises(RunError, match="is private: going back would not take back"):
        fedprior.rollback(run, 2)
    assert len(records_of(run)) == 3


def test_the_servers_log_says_where_to_go_back_when_the_loss_jumps(make_job, tmp_path, monkeypatch, caplog):
    """Devices report a loss that is a hundred times as high from round 14 on, as after a poisoned round 13."""
    read, rounds = messages.read_answer, {"rounds": 18, "keep_checkpoints": 2}

    def high(content, client, server, turn, limits):
        answer = read(content, client, server, turn, limits)
        return answer._replace(loss=answer.loss * (100 if turn.number > 13 else 1))

    monkeypatch.setattr(messages, "read_answer", high)
    job, run = make_job("fedavg", rounds), tmp_path / "run"
    with caplog.at_level(logging.WARNING, "flwr"):
        serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(run)})
    (said,) = [record.getMessage() for record in caplog.records if "jumped" in record.getMessage()]
    assert said.startswith("the loss jumped in round 14: ")
    assert said.endswith(f"`fedprior rollback {run} --to 12`")
    assert kept_rounds(run) == [12, 17, 18]
