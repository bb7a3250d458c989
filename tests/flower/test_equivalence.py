"""One algorithm object, several engines: what Flower's strategy and clients compute is what the simulator computes."""

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'fedprior[flower]'")

import torch
from local_grid import LocalGrid

import fedprior
from fedprior import trees
from fedprior.flower import HardEM, Server
from fedprior.simulate.run import build

RUN = "0123456789abcdef"
COUNTED = ("round", "bytes_up", "bytes_down", "floored", "global_accuracy", "sparsity")
"""No sum of floats is in these."""
ROUNDED = ["fedsparse+scaffold", "fedsparse-unstructured", "feddrop", "fedmedian", "fedmix", "fedl1"]


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        *((name, "float32") for name in fedprior.ALGORITHMS),
        *((name, "int8/int4") for name in ROUNDED),
        ("fedavg", "int4"),
        ("fednarrow", "int4"),
    ],
)
def test_same_numbers_as_the_simulator(name, wire, make_job, quick, tmp_path):
    """In float64: a temperature, Adam and rounding to a grid make much of a last bit of float32."""
    options = {"local_optimiser": "SGD(lr=0.1)"}
    if name == "fednarrow":
        options |= {"sparsity": 0.3, "linear_rate": 0.4, "conv_rate": 0.2, "average": True}
    elif name.startswith("fedsparse"):
        options |= {"temperature": 0.05, "lambda0": 1e-3}  # so that gates close within three rounds
    job = make_job(name, {"evaluate_every": 2, "wire": wire}, dtype=torch.float64, **options)
    simulated = build(job.algorithm, job.network, job.data, job.settings)
    records = [simulated.step(evaluate=number in (2, 3)) for number in (1, 2, 3)]

    server, kept = Server.new(job, RUN), []
    HardEM(server, quick, kept.append).start(LocalGrid(job, tmp_path))

    for (path, ours), (other, theirs) in zip(trees.leaves(server.state), trees.leaves(simulated.server), strict=True):
        assert path == other
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=path)
    assert torch.equal(server.accuracy.nan_to_num(-1), simulated.accuracy.nan_to_num(-1))
    for ours, theirs in zip(kept, records, strict=True):
        clients = ours.pop("clients")
        assert len(clients) == 3
        assert ours.pop("examples") == [(5, 11, 2, 8, 9, 3)[client] for client in clients]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            counted = key in COUNTED
            assert ours[key] == (value if counted else pytest.approx(value, rel=0, abs=1e-9, nan_ok=True)), key
