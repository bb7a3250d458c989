"""Draws from the prior and clients' hard assignments, as an ensemble."""

import numpy as np
import pytest
import torch

import fedprior
from fedprior.core import keys
from fedprior.core.errors import SettingError
from fedprior.core.keys import Purpose
from fedprior.trained.export import personal_model


def trained(small_task, name, rounds=2, **settings):
    task = small_task(dtype=torch.float64)
    return fedprior.run(task, fedprior.algorithm(name, task.network, **settings), rounds=rounds, workers=1)


def test_outputs_are_the_logarithm_of_the_mean_probability(small_task):
    """Of the clients' own models, which are the personal ones; and their likelihood is NumPy's."""
    result = trained(small_task, "fedavg")
    drawn, data = fedprior.posterior(result, samples=3, of="clients"), result.simulation.data
    root = keys.fold(result.simulation.root, Purpose.POSTERIOR)
    models = [personal_model(result.simulation, client) for client in keys.choose(root, 6, 3)]
    mean = torch.stack([model(data.test_x).softmax(1) for model in models]).mean(0).detach()
    assert drawn(data.test_x).exp().detach().numpy() == pytest.approx(mean.numpy())
    scores = fedprior.evaluate(result, posterior=drawn)
    truth = -np.log(mean.numpy()[range(len(data.test_y)), data.test_y.numpy()]).mean()
    assert scores["nll"] == pytest.approx(truth)
    assert scores["server"]["nll"] == pytest.approx(result.summary["global_nll"])


@pytest.mark.parametrize("name", ["fedsparse", "fedsparse-unstructured"])
def test_gates_are_drawn_from_theta(small_task, name):
    """Thresholds are set so that θ is 0.6: as often are gates open, and what they leave is as it was."""
    result = trained(small_task, name, rounds=1)
    sim, prior = result.simulation, result.simulation.algorithm.prior
    norms = prior.norms(sim.server["weights"], sim.server)
    logit = torch.logit(torch.tensor(0.6, dtype=torch.float64))
    sim.server = {
        **sim.server,
        "thresholds": prior.gating.part(prior._thresholds(norms, torch.full_like(norms, logit))),
    }
    theta = prior.gating.join(prior.gates(prior.prune(sim.server)))
    assert float(theta.median()) == pytest.approx(0.6, abs=1e-6)
    members = fedprior.posterior(result, samples=400).members
    weights = dict(sim.algorithm.predict(prior.prune(sim.server)))["conv.weight"][0]
    kept = torch.stack([member.conv.weight != 0 for member in members]).double()[:, weights != 0]
    assert float(kept.mean()) == pytest.approx(0.6, abs=0.04)
    values = torch.stack([member.conv.weight for member in members])
    assert ((values == 0) | (values == weights)).all(), "what is drawn is kept as it is"


@pytest.mark.parametrize(("name", "settings"), [("feddrop", {}), ("fednarrow", {"linear_rate": 0.5})])
def test_draws_are_around_the_average_that_the_run_ships(small_task, name, settings):
    result = trained(small_task, name, rounds=30, average=True, **settings)
    server = result.simulation.server
    average, last = (server[section]["fc1.weight"] for section in ("average", "weights"))
    assert not torch.equal(average, last), "else this test shows nothing"
    for member in fedprior.posterior(result, samples=4).members:
        drawn = member.fc1.weight
        assert (drawn != 0).any()
        assert torch.equal(drawn[drawn != 0], average[drawn != 0])


def test_masks_are_drawn_and_a_mixture_gives_its_components(small_task):
    masks = fedprior.posterior(trained(small_task, "fedpm"), samples=5)
    assert len(masks.members) == 5
    assert not torch.equal(masks.members[0].fc1.weight, masks.members[1].fc1.weight)
    result = trained(small_task, "fedmix")
    mixture, x = fedprior.posterior(result, samples=2), result.simulation.data.test_x
    assert torch.allclose(mixture(x), result.model(x))


def test_a_run_on_disk_has_the_same_posterior(small_task, tmp_path, plain_arithmetic):
    task = small_task(dtype=torch.float64)
    result = fedprior.run(task, "fedpm", rounds=2, out=tmp_path / "run", workers=1)
    x = task.data.test_x
    again = fedprior.posterior(tmp_path / "run", samples=3, task=task)
    assert torch.equal(again(x), fedprior.posterior(result, samples=3)(x))


def test_a_posterior_of_another_run_is_refused(small_task, tmp_path):
    """Also of one that differs only in its seed, and of the same one earlier; but a network of one's own is welcome."""
    task = small_task(dtype=torch.float64)
    runs = {
        seed: fedprior.run(task, "fedpm", rounds=2, seed=seed, workers=1, out=tmp_path / str(seed)) for seed in (0, 1)
    }
    own = fedprior.posterior(runs[0], samples=2)
    for same in (runs[0], tmp_path / "0"):
        assert fedprior.evaluate(same, posterior=own, task=task)["title"] == "own, fedpm, round 2"
    assert fedprior.evaluate(runs[0], posterior=fedprior.posterior(tmp_path / "0", samples=2, task=task))["server"]
    assert fedprior.evaluate(runs[0], posterior=runs[1].model)["server"]
    with pytest.raises(
        SettingError, match="is of another run with this title, and the run is own, fedpm, round 2: draw"
    ):
        fedprior.evaluate(runs[1], posterior=own)
    with pytest.raises(
        SettingError, match="the posterior is of own, fedpm, round 2, and the run is own, fedavg, round 1"
    ):
        fedprior.evaluate(fedprior.run(task, "fedavg", rounds=1), posterior=own)
    fedprior.resume(tmp_path / "0", task=task, rounds=3)
    with pytest.raises(
        SettingError, match="the posterior is of own, fedpm, round 2, and the run is own, fedpm, round 3"
    ):
        fedprior.evaluate(tmp_path / "0", posterior=own, task=task)


def test_what_is_no_posterior_is_refused(small_task):
    result = trained(small_task, "fedavg")
    for given, why in (
        ({}, "draws the same network each time"),
        ({"of": "weights"}, "of must be prior or clients, got 'weights'"),
        ({"samples": 0}, "^samples must be a whole number of at least 1, got 0$"),
        ({"samples": 1.5}, "samples must be a whole number of at least 1, got 1.5"),
        ({"samples": "a"}, "samples must be a whole number of at least 1, got 'a'"),
        ({"of": "clients", "samples": 7}, "samples must be at most 6, the number of clients, got 7"),
    ):
        with pytest.raises(SettingError, match=why):
            fedprior.posterior(result, **given)
    with pytest.raises(SettingError, match="choose one of posterior, best and personalise"):
        fedprior.evaluate(result, posterior=result.model, personalise=0)
