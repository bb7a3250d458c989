"""Settings arrive where they belong: every one of a named algorithm, told apart by its value."""

import pytest
import torch
from torch import nn

import fedprior
from fedprior.catalogue.algorithms import ALGORITHMS, recorded_algorithm
from fedprior.core.network import Network
from fedprior.core.options import options_of
from fedprior.corrections import Correction, Scaffold
from fedprior.priors import SpikeSlab

NETWORK = Network(
    nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2)
)
SPIKE = {
    **{"lambda0": 0.01, "precision": 0.02, "cross_entropy": 0.03, "temperature": 0.04, "theta_start": 0.95},
    **{"prune_below": 0.06, "dense_rounds": 7, "prune_server": False, "thresholds": "follow"},
}


def rates(optimisers: object) -> dict[str, float]:
    return {section: optimiser.lr for section, optimiser in dict(optimisers or {}).items()}


@pytest.mark.parametrize("name", ["fedsparse", "fedsparse-unstructured", "fedsparse+scaffold"])
def test_spike_and_slabs_settings_reach_prior_and_optimisers(name: str) -> None:
    optimisers = {
        "local_optimiser": "SGD(lr=0.1)",
        "local_threshold_optimiser": "Adamax(lr=0.2)",
        "server_optimiser": "Adam(lr=0.3)",
        "server_threshold_optimiser": "Adamax(lr=0.4)",
    }
    built = fedprior.algorithm(name, NETWORK, **SPIKE, **optimisers)
    assert isinstance(built.prior, SpikeSlab)
    assert {key: getattr(built.prior, key) for key in SPIKE} == SPIKE
    assert rates(built.local) == {"weights": 0.1, "thresholds": 0.2}
    assert rates(built.server) == {"weights": 0.3, "thresholds": 0.4}
    assert isinstance(built.correction, Scaffold) == ("scaffold" in name)
    closed = fedprior.algorithm(name, NETWORK, server_optimiser="none")
    assert closed.server is None


def test_spike_and_slabs_defaults_are_the_papers() -> None:
    """Appendix: T = 0.001, θ = 0.99 at the start, ε = 0.1, the cross-entropy by 1e-4, Adamax for thresholds."""
    prior = fedprior.algorithm("fedsparse", NETWORK).prior
    assert isinstance(prior, SpikeSlab)
    assert (prior.temperature, prior.theta_start, prior.prune_below, prior.cross_entropy) == (1e-3, 0.99, 0.1, 1e-4)
    assert (prior.precision, prior.prune_server, prior.thresholds, prior.dense_rounds) == (0, True, "stay", 0)
    built = fedprior.algorithm("fedsparse", NETWORK)
    assert [optimiser.name for optimiser in built.local.values()] == ["SGD", "Adamax"]
    assert dict(built.server or {})["thresholds"].name == "Adamax"
    assert rates(built.local)["thresholds"] == 1e-3
    assert rates(built.server)["thresholds"] == 1e-2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedprox", {"precision": 0.7}),
        ("fedavg", {"precision": 0.0}),
        ("fedmedian", {"precision": 0.7}),
        ("fedmix", {"components": 4, "precision": 0.7, "spread": 0.3}),
        ("feddrop", {"noise": True, "precision": 0.7}),
        ("fedl1", {"strength": 0.7}),
        (
            "fednarrow",
            {
                **{"sparsity": 0.3, "precision": 0.7, "dense_rounds": 3, "shrink": 0.4},
                **{"conv_rate": 0.1, "linear_rate": 0.2},
            },
        ),
    ],
)
def test_settings_reach_the_prior(name: str, settings: dict) -> None:
    optimisers = {"local_optimiser": "SGD(lr=0.1)", "server_optimiser": "SGD(lr=0.3)"}
    built = recorded_algorithm(name, NETWORK, {**settings, **optimisers})  # also where the network has no convolution
    assert {key: getattr(built.prior, key) for key in settings} == settings
    assert (rates(built.local), rates(built.server)) == ({"weights": 0.1}, {"weights": 0.3})
    assert type(built.correction) is Correction


@pytest.mark.parametrize("name", [name for name, entry in ALGORITHMS.items() if "floor" in options_of(entry.build)])
def test_floor_and_average_reach_the_algorithm(name: str) -> None:
    gating = fedprior.algorithm(name, NETWORK, floor=2).prior.gating
    assert gating.least == 2
    if "average" in options_of(ALGORITHMS[name].build):
        assert fedprior.algorithm(name, NETWORK, average=True).average
        assert not fedprior.algorithm(name, NETWORK).average


def test_a_named_algorithms_m_step_is_what_it_says() -> None:
    for name in ("fedavg", "fedprox", "fedmedian", "fedmix", "feddrop", "scaffold"):
        assert fedprior.algorithm(name, NETWORK).server is None, name
    built = {name: dict(fedprior.algorithm(name, NETWORK).server or {})["weights"] for name in ("fedavgm", "reptile")}
    assert built["fedavgm"].settings["momentum"] == 0.9
    assert built["fedavgm"].lr == 1.0
    assert built["reptile"].lr == 0.5


def test_a_number_of_parameters_is_a_sparsity() -> None:
    """The network has 12 + 20 + 10 = 42 parameters."""
    prior = fedprior.algorithm("fednarrow", NETWORK, max_parameters=30).prior
    assert prior.sparsity == pytest.approx(1 - 30 / 42)
    assert fedprior.algorithm("fednarrow", NETWORK, max_parameters=1000).prior.sparsity == 0
    for wrong in ({"max_parameters": 0}, {"max_parameters": 10, "sparsity": 0.5}):
        with pytest.raises(fedprior.SettingError):
            fedprior.algorithm("fednarrow", NETWORK, **wrong)


def test_scaffold_needs_plain_descent() -> None:
    with pytest.raises(fedprior.SettingError, match="SGD"):
        fedprior.algorithm("scaffold", NETWORK, local_optimiser="Adam(lr=0.1)")
