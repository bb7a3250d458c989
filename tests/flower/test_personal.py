"""A client's own model of a deployed run is the one of the simulated run: both go on from the same state."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import torch
from local_grid import LocalGrid

import fedprior
from fedprior.flower.apps import serve
from fedprior.trained.export import trained

LIMITS = {"round-seconds": 0.2, "start-seconds": 0.2, "poll-seconds": 0.001, "wait-for": 6}


@pytest.mark.parametrize("name", ["fedavg", "fedsparse"])
def test_a_clients_own_model_is_the_simulators(name, make_job, tmp_path):
    job = make_job(name)
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(tmp_path / "run")})
    task = fedprior.Task("small", job.network, job.data)
    result = fedprior.run(task, job.algorithm, **{**vars(job.settings), "device": "cpu"})
    deployed = trained(tmp_path / "run", personalise=1, task=task, algorithm=job.algorithm)
    simulated = trained(result, personalise=1)
    assert deployed.title.endswith("round 3, client 1's own model")
    own, there = deployed.module.state_dict(), simulated.module.state_dict()
    server = deployed.server.state_dict()
    for key in own:
        torch.testing.assert_close(own[key], there[key])
        torch.testing.assert_close(server[key], simulated.server.state_dict()[key])
    assert any(not torch.equal(own[key], server[key]) for key in own)


def test_what_only_devices_remember_is_one_line(make_job, tmp_path):
    job = make_job("fedsparse+scaffold", local_optimiser="SGD(lr=0.1)")
    serve(job, LocalGrid(job, tmp_path), {**LIMITS, "out": str(tmp_path / "run")})
    task = fedprior.Task("small", job.network, job.data)
    with pytest.raises(fedprior.RunError, match="remember what only their own devices have"):
        trained(tmp_path / "run", personalise=1, task=task, algorithm=job.algorithm)
    assert trained(tmp_path / "run", task=task, algorithm=job.algorithm).client is None
