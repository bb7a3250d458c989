"""Algorithms by name. Each is a prior, a way to take the M-step, and the paper's settings as defaults.

The server's step on weights is the exception. It is the mean for all, unless an algorithm is named after another step:
methods that are compared should differ in their priors. The paper's Adam is a setting of its
tasks (`catalogue/tasks/named.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fedprior.catalogue.algorithms.factories import (
    bernoulli_mask,
    distance,
    fixed_gates,
    gaussian,
    gaussian_posterior,
    group_lasso,
    laplace,
    mixture,
    narrow,
    sized_slab,
    spike_slab,
    student_t,
)
from fedprior.core.errors import SettingError, described
from fedprior.core.network import Network
from fedprior.core.options import call, check_effect, convert, nearest, options_of, resolve
from fedprior.core.settings import RUN_OPTIONS, Settings
from fedprior.em import Algorithm


@dataclass(frozen=True)
class Entry:
    """A named algorithm: its factory with some settings changed, and what `fedprior algorithms` says about it."""

    build: Callable[..., Algorithm]
    prior: str
    m_step: str
    preset: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry(gaussian, "Gaussian, λ → 0", "mean"),
    "fedprox": Entry(gaussian, "Gaussian, λ = μ", "mean", {"precision": 0.1}),
    "fedavgm": Entry(gaussian, "Gaussian", "SGD with momentum", {"server_optimiser": "SGD(lr=1.0, momentum=0.9)"}),
    "fedadam": Entry(gaussian, "Gaussian", "Adam", {"server_optimiser": "Adam(lr=0.001)"}),
    "reptile": Entry(gaussian, "Gaussian", "one SGD step", {"server_optimiser": "SGD(lr=0.5)"}),
    "fedgauss": Entry(gaussian_posterior, "Gaussian posterior", "product of the clients' Gaussians"),
    "fedsparse": Entry(spike_slab, "spike and slab over units", "mean of w by one step, Adamax on v"),
    "fedsparse-unstructured": Entry(
        spike_slab, "spike and slab over weights", "mean of w by one step, Adamax on v", {"structured": False}
    ),
    "fedsparse-sized": Entry(
        sized_slab, "spike and slab over units, bound by a size", "gated mean, the gates with the most votes that fit"
    ),
    "fednarrow": Entry(narrow, "global gates over units, bound by a size", "gated mean, the best gates that fit"),
    "fednarrow-unstructured": Entry(
        narrow,
        "global gates over weights, bound by a size",
        "gated mean, the best gates that fit",
        {"structured": False},
    ),
    "fedmedian": Entry(laplace, "Laplace", "coordinate-wise median"),
    "fedgeomedian": Entry(distance, "Laplace of a client's distance", "geometric median"),
    "fedtrim": Entry(student_t, "Student-t", "trimmed mean", {"steps": 0}),
    "fedstudent": Entry(student_t, "Student-t", "mean weighed anew from the trimmed mean"),
    "fedmix": Entry(mixture, "mixture of K Gaussians", "responsibility-weighted means"),
    "feddrop": Entry(fixed_gates, "gates of fixed probability, drawn by the server", "gated mean"),
    "fedl1": Entry(group_lasso, "group lasso", "mean; absence is a vote for zero"),
    "fedpm": Entry(bernoulli_mask, "Bernoulli masks over fixed random weights", "mean of the votes"),
    "fedtopk": Entry(gaussian, "Gaussian, λ → 0, with an error memory", "mean", {"top_k": 0.01}),
    "scaffold": Entry(gaussian, "Gaussian, λ → 0, with control variates", "mean", {"scaffold": True}),
    "fedsparse+scaffold": Entry(
        spike_slab,
        "spike and slab over units, with control variates",
        "mean of w by one step, Adamax on v",
        {"scaffold": True},
    ),
    "fednarrow+scaffold": Entry(
        narrow,
        "global gates over units, bound by a size, with control variates",
        "gated mean, the best gates that fit",
        {"scaffold": True},
    ),
}
SIZES = ("sparsity", "max_parameters")
"""Settings that say how large the network should be."""


def entry(name: str) -> Entry:
    """The algorithm of that name."""
    if name not in ALGORITHMS:
        raise nearest(name, ALGORITHMS, "algorithm")
    return ALGORITHMS[name]


def algorithm_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a named algorithm; those not given have their defaults."""
    chosen = entry(name)
    if any(key in SIZES for key in given):
        check_sized(name)
    return resolve(chosen.build, {**chosen.preset, **given}, name)


def sized(name: str) -> bool:
    """Whether an algorithm can be asked for a size."""
    return "sparsity" in options_of(entry(name).build)


def check_sized(name: str) -> None:
    """Refuse a size where the gates are learned and λ₀ says how many close."""
    if "lambda0" in options_of(entry(name).build):
        raise SettingError(
            f"{name} takes no size: λ₀ (lambda0=5e-6) decides how many gates close; for a size take fedsparse-sized, "
            f"which learns which ones, or {name.replace('fedsparse', 'fednarrow')}, narrowed before training"
        )


def run_settings(given: Mapping[str, Any], clients: int = Settings.clients_per_round, algorithm: str = "") -> Settings:
    """Settings of a run from text or values; where there are few clients, cohorts are small by default.

    The name of the run's algorithm, if it is known, tells whose a setting is that no run has.
    """
    for name in given:
        if name not in RUN_OPTIONS:
            raise _unknown(name, algorithm)
    few = {"clients_per_round": min(Settings.clients_per_round, clients)}
    return Settings(**few | {name: convert(RUN_OPTIONS[name], value) for name, value in given.items()})


def _unknown(name: str, algorithm: str) -> SettingError:
    """The error for a name that is no setting of a run; those of an algorithm are given where it is made."""
    owners = [owner for owner in ALGORITHMS if name in algorithm_settings(owner, {})]
    if owners and algorithm and algorithm not in ALGORITHMS:
        return SettingError(
            f"unknown setting of a run {name!r}; an algorithm of your own takes its settings where you make it"
        )
    if owners:
        owner = algorithm if algorithm in owners else owners[0]
        return SettingError(
            f"unknown setting of a run {name!r}; algorithms have it: run(task, "
            f"fedprior.algorithm({owner!r}, task.network, {name}=…))"
        )
    return nearest(name, RUN_OPTIONS, "setting of a run")


def algorithm(name: str, network: Network, **settings: Any) -> Algorithm:
    """A named algorithm for a network: `algorithm("fedsparse", network, lambda0=5e-5)`."""
    return asked_algorithm(name, network, settings)


def asked_algorithm(
    name: str, network: Network, settings: Mapping[str, Any], usual: Mapping[str, Any] = MappingProxyType({})
) -> Algorithm:
    """A named algorithm with the settings asked for, over those that are `usual` on a task.

    A setting without effect is refused if it was asked for.
    """
    if not isinstance(network, Network):
        raise SettingError(f"an algorithm is built for a Network, such as task.network; got {described(network)}")
    known, chosen = options_of(entry(name).build), {**usual, **settings}
    asked = {key: known[key] for key in settings if key in known}
    check_effect(asked, algorithm_settings(name, chosen), network=network)
    return recorded_algorithm(name, network, chosen)


def recorded_algorithm(name: str, network: Network, settings: Mapping[str, Any]) -> Algorithm:
    """The algorithm as a run recorded it. The run may be older than the refusal of settings without effect."""
    resolved = algorithm_settings(name, settings)
    built = call(entry(name).build, network, options=resolved)
    built.prior.check()
    gated = hasattr(built.prior, "gating")
    shapes = {key: tuple(value.shape) for key, value in network.params().items()} if gated else None
    return replace(built, name=name, settings=resolved, shapes=shapes)
