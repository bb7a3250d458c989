"""A private run on Flower: the simulator's numbers, but with secrets of its own."""

import math

import pytest
import torch
from local_grid import LocalGrid

from fedprior.core import trees
from fedprior.core.errors import SettingError
from fedprior.em.folding import obstacle
from fedprior.engines.build import build
from fedprior.flower import HardEM, Server, server_checkpoint

RUN = "0123456789abcdef"
SETTINGS = {"noise_multiplier": 1.0, "clip": 0.1, "evaluate_every": 1, "clients_per_round": 1, "rounds": 8}


def deployed(job, quick, tmp_path, secret=None):
    server, kept = Server.new(job, RUN), []
    server.secret = server.secret if secret is None else secret
    HardEM(server, quick, kept.append).start(LocalGrid(job, tmp_path))
    return server, kept


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
