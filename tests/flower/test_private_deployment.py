"""A private run on Flower: the simulator's numbers, but with secrets of its own."""

import logging
import math

import pytest
import torch
from local_grid import LocalGrid, Slow

from fedprior.core import keys, trees
from fedprior.core.errors import SettingError
from fedprior.core.keys import Turn
from fedprior.em import protocol
from fedprior.em.folding import obstacle
from fedprior.engines.build import build
from fedprior.flower import HardEM, Limits, Server, server_checkpoint
from fedprior.flower.apps import serve

RUN = "0123456789abcdef"
SETTINGS = {"noise_multiplier": 1.0, "clip": 0.1, "evaluate_every": 1, "clients_per_round": 1, "rounds": 8}


def deployed(job, quick, tmp_path, secret=None, grid=LocalGrid):
    server, kept = Server.new(job, RUN), []
    server.secret = server.secret if secret is None else secret
    HardEM(server, quick, kept.append).start(grid(job, tmp_path))
    return server, kept


def one_by_one(job, folder):
    """Devices that answer at different times, the last client first; all of them long before time is up."""
    return Slow(job, folder, {client: 3 * (6 - client) for client in range(6)})


def without_two(job, folder):
    """Two devices are not there before time is up."""
    return Slow(job, folder, {1: 10**6, 4: 10**6})


@pytest.mark.parametrize("adaptive", [{}, {"noise_multiplier": 0.05, "clip_quantile": 0.6}], ids=["fixed", "adaptive"])
def test_with_the_simulators_secret_it_has_the_simulators_numbers(adaptive, make_job, quick, tmp_path):
    """Rounds without any client are among them."""
    pytest.importorskip("dp_accounting")
    job = make_job("fedavg", {**SETTINGS, **adaptive}, dtype=torch.float64)
    simulated = build(job.algorithm, job.network, job.data, job.settings)
    records = [simulated.step(evaluate=True) for _ in range(8)]
    server, kept = deployed(job, quick, tmp_path, simulated.root)
    for (path, ours), (_, theirs) in zip(trees.leaves(server.state), trees.leaves(simulated.server), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=path)
    assert [record["epsilon"] for record in kept] == [record["epsilon"] for record in records]
    clips = [[record.get("clip", 0.1) for record in found] for found in (kept, records)]
    assert clips[0] == pytest.approx(clips[1], rel=1e-9)
    assert len(set(clips[0])) == (8 if adaptive else 1)
    sizes = [len(record["clients"]) for record in kept]
    assert len(set(sizes)) > 1, "a random number of clients"
    assert 0 in sizes
    assert math.isnan(kept[sizes.index(0)]["train_loss"])


def test_a_round_waits_for_everyone_who_was_drawn(make_job, quick, tmp_path):
    """The simulator's cohorts are Poisson samples, some of them larger than the two clients of their average."""
    pytest.importorskip("dp_accounting")
    job = make_job("fedavg", {**SETTINGS, "clients_per_round": 2}, dtype=torch.float64)
    simulated = build(job.algorithm, job.network, job.data, job.settings)
    drawn = [protocol.cohort(Turn(simulated.root, number), 6, 2, private=True) for number in range(1, 9)]
    for _ in drawn:
        simulated.step(evaluate=False)
    assert max(len(cohort) for cohort in drawn) > 2
    server, kept = deployed(job, quick, tmp_path, simulated.root, one_by_one)
    assert [record["clients"] for record in kept] == drawn
    for (path, ours), (_, theirs) in zip(trees.leaves(server.state), trees.leaves(simulated.server), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=path)


def test_who_is_not_there_in_time_is_missing_and_nobody_else(make_job, quick, tmp_path):
    """Also where more have answered than a cohort has on average, and with no need of anyone."""
    pytest.importorskip("dp_accounting")
    job = make_job("fedavg", {**SETTINGS, "clients_per_round": 2, "rounds": 1})
    for seed in range(40):
        cohort = protocol.cohort(Turn(keys.key(seed), 1), 6, 2, private=True)
        if {1, 4} < set(cohort) and len(cohort) > 3:
            break
    _, (record,) = deployed(job, quick, tmp_path, keys.key(seed), without_two)
    assert record["clients"] == [one for one in cohort if one not in (1, 4)]
    assert sorted(fault["client"] for fault in record["faults"]) == [1, 4]
    assert "stragglers" not in record


@pytest.mark.parametrize("limits", [{"aggregate_at": 0.5}, {"over_select": 0.5}], ids=str)
def test_a_round_that_the_fastest_would_close_is_refused(limits, make_job):
    server = Server.new(make_job("fedavg", {**SETTINGS, "clients_per_round": 4, "noise_multiplier": 0.0}), RUN)
    with pytest.raises(SettingError, match="who is in a round must not depend on who answers first"):
        HardEM(server, Limits(**limits))


@pytest.mark.parametrize(("noise", "said"), [(0.05, 0), (0.07, 1)])
def test_a_clip_that_takes_much_of_the_budget_to_adapt_is_in_the_log(noise, said, make_job, tmp_path, caplog):
    pytest.importorskip("dp_accounting")
    job = make_job("fedavg", {**SETTINGS, "noise_multiplier": noise, "clip_quantile": 0.6, "rounds": 1})
    limits = {"round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 6}
    with caplog.at_level(logging.WARNING, "flwr"):
        serve(job, LocalGrid(job, tmp_path), {**limits, "out": str(tmp_path / "run")})
    assert sum("noise of uploads is 0.098 times the clip" in one.getMessage() for one in caplog.records) == said


def test_a_server_that_starts_again_goes_on_with_the_clip(make_job, quick, tmp_path):
    pytest.importorskip("dp_accounting")
    job = make_job("fedavg", {**SETTINGS, "noise_multiplier": 0.05, "clip_quantile": 0.6})
    server, kept = deployed(job, quick, tmp_path)
    server_checkpoint.save(tmp_path / "checkpoint", server, "")
    again = Server.new(job, RUN)
    assert float(again.state["clip"]["norm"]) == 0.1
    server_checkpoint.load(tmp_path / "checkpoint", again)
    assert torch.equal(again.state["clip"]["norm"], server.state["clip"]["norm"])
    assert float(again.state["clip"]["norm"]) not in (0.1, kept[-1]["clip"]), "that of the next round"


def test_cohorts_and_noise_do_not_follow_from_the_seed_that_devices_know(make_job, quick, tmp_path):
    pytest.importorskip("dp_accounting")
    job = make_job("fedavg", {**SETTINGS, "noise_multiplier": 100.0, "rounds": 1})
    states = [
        torch.cat([v.flatten() for v in deployed(job, quick, tmp_path)[0].state["weights"].values()]) for _ in "ab"
    ]
    start = torch.cat([v.flatten() for v in Server.new(job, RUN).state["weights"].values()])
    first, second = (state - start for state in states)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.3


def test_a_deployment_beyond_its_budget_does_not_start(make_job):
    pytest.importorskip("dp_accounting")
    with pytest.raises(SettingError, match="budget is epsilon=1: it allows 0 rounds"):
        Server.new(make_job("fedavg", {**SETTINGS, "epsilon": 1.0}), RUN)


def test_uploads_that_are_clipped_are_not_folded(make_job):
    """Folding takes one upload after another, before anything has clipped it."""
    for settings, why in (({"clip": 1.0}, "uploads are clipped together"), ({}, "")):
        job = make_job("fedavg", settings)
        assert obstacle(job.algorithm, Server.new(job, RUN).state) == why
