"""Data on the host give the same numbers as data on the device."""

import pytest
import torch

import fedprior
from fedprior.core import trees
from fedprior.core.settings import Settings
from fedprior.engines.batches import Places
from fedprior.engines.build import build
from fedprior.engines.modes import engine
from fedprior.engines.stacked import streaming


def flat(result):
    return torch.cat([leaf.double().reshape(-1) for _, leaf in trees.leaves(result.simulation.server)])


@pytest.mark.parametrize("tests", [None, (6, 0, 3, 0, 1, 2), (0,) * 6], ids=["tests", "some", "none"])
@pytest.mark.parametrize("mode", ["in-turn", "vectorised"])
@pytest.mark.parametrize("name", ["fedavg", "fedsparse", "fedmix", "scaffold"])
def test_streamed_equals_resident(small_task, name, mode, tests):
    one, other = (
        fedprior.run(small_task(test_sizes=tests), name, mode=mode, epochs=2, data=where)
        for where in ("device", "host")
    )
    assert str(one.records) == str(other.records)  # as text: nan is not equal to itself
    assert torch.equal(flat(one), flat(other))
    assert torch.equal(one.simulation.accuracy.nan_to_num(-1), other.simulation.accuracy.nan_to_num(-1))


def test_runs_of_a_sweep_can_stream(small_task):
    def servers(where):
        task = small_task()
        algorithm = fedprior.algorithm("fedsparse", task.network)
        settings = [Settings(clients_per_round=3, batch_size=4, seed=seed, device="cpu", data=where) for seed in (0, 1)]
        simulations = [build(algorithm, task.network, task.data, each) for each in settings]
        driver = engine(simulations, "vectorised")
        records = [driver.step(evaluate=True) for _ in range(3)]
        return records, [leaf for sim in simulations for _, leaf in trees.leaves(sim.server)]

    (one, mine), (other, theirs) = servers("device"), servers("host")
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_only_the_cohorts_examples_are_copied_to_the_device(small_task):
    """What a round brings along are the rows of its clients, padded with their last, and nothing else."""
    data = small_task().data
    clients = [1, 2, 4]
    examples = streaming.cohort_examples([(data, client) for client in clients], 12, 8, torch.device("cpu"))
    assert len(examples["train"]["x"]) == 3 * 12
    size = torch.tensor([data.train.size(client) for client in clients])
    x, y, places = streaming.places(examples["train"], size)
    assert isinstance(places, Places)
    for client, rows in zip(clients, places.padded(12), strict=True):
        own = data.train[client][torch.arange(12).clamp(max=data.train.size(client) - 1)]
        assert torch.equal(x[rows], data.x[own])
        assert torch.equal(y[rows], data.y[own])


def test_an_unknown_location_of_data_is_refused():
    with pytest.raises(fedprior.SettingError, match="auto, device or host"):
        Settings(data="disk")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streamed_equals_resident_in_a_captured_graph(small_task):
    one, other = (fedprior.run(small_task(device="cuda"), "fedsparse", data=where) for where in ("device", "host"))
    assert one.summary["mode"] == other.summary["mode"] == "captured"
    assert str(one.records) == str(other.records)
    assert other.simulation.data.x.device.type == "cpu"
