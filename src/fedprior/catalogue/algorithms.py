"""Algorithms by name. Each is a prior, a way to take the M-step, and the paper's settings as defaults.

The server's step on weights is the exception. It is the mean for all, unless an algorithm is named after another step:
methods that are compared should differ in their priors. The paper's Adam is a setting of its tasks (`tasks/named.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fedprior.catalogue import options
from fedprior.core.adapters import find_adapters
from fedprior.core.errors import SettingError, described
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser
from fedprior.core.options import check_effect, convert, nearest, options_of, resolve
from fedprior.core.settings import RUN_OPTIONS, Settings
from fedprior.corrections import Correction, Scaffold, TopK
from fedprior.em import Algorithm
from fedprior.priors import (
    BernoulliMask,
    FixedGates,
    Gaussian,
    GroupLasso,
    Laplace,
    Mixture,
    Narrow,
    Prior,
    Products,
    Sized,
    SpikeSlab,
)
from fedprior.priors.bernoulli_mask import Slab
from fedprior.units import Gating, UnitGating, WeightGating, find_structure

SGD = Optimiser.preset("SGD", lr=0.05)
MEAN = Optimiser.preset("SGD", lr=1.0)
"""One step of length one reaches the mean; for weights beside variables that need their gradient."""


def gaussian(
    network: Network,
    *,
    precision: options.Precision = 0.0,
    local_optimiser: options.LocalOptimiser = SGD,
    server_optimiser: options.ServerOptimiser = None,
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
    average: options.Average = False,
    products: options.OfProducts = False,
) -> Algorithm:
    """A Gaussian prior of precision λ; without a server optimiser the M-step is the mean."""
    prior = Gaussian(precision)
    if products:
        if server_optimiser:
            raise SettingError("products=true is a closed-form M-step: leave out server_optimiser")
        prior = Products(precision, find_adapters(network.module))
    return _weights_only(prior, local_optimiser, server_optimiser, scaffold, top_k, average)


def laplace(
    network: Network,
    *,
    precision: options.Precision = 1e-3,
    local_optimiser: options.LocalOptimiser = SGD,
    server_optimiser: options.ServerOptimiser = None,
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
) -> Algorithm:
    """A Laplace prior of precision λ; without a server optimiser the M-step is the median, with one a sign gradient."""
    return _weights_only(Laplace(precision), local_optimiser, server_optimiser, scaffold, top_k)


def mixture(
    network: Network,
    *,
    components: options.Components = 3,
    precision: options.Precision = 0.1,
    spread: options.Spread = 0.1,
    local_optimiser: options.LocalOptimiser = SGD,
    server_optimiser: options.ServerOptimiser = None,
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
) -> Algorithm:
    """A mixture of Gaussians; without a server optimiser the M-step is the responsibility-weighted mean."""
    return _weights_only(Mixture(components, precision, spread), local_optimiser, server_optimiser, scaffold, top_k)


def fixed_gates(
    network: Network,
    *,
    conv_rate: options.ConvRate = 0.1,
    linear_rate: options.LinearRate = 0.5,
    input_rate: options.InputRate = 0.01,
    output_rate: options.OutputRate = 0.01,
    noise: options.Noise = False,
    precision: options.Precision = 0.0,
    ungated: options.Ungated = (),
    floor: options.Floor = 1,
    local_optimiser: options.LocalOptimiser = SGD,
    server_optimiser: options.ServerOptimiser = None,
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
    average: options.Average = False,
) -> Algorithm:
    """Gates with fixed dropout rates; a layer that reads the input or feeds the output has a rate of its own."""
    structure = find_structure(network.module, network.example, gate_output=output_rate > 0, ungated=ungated)
    given = {"conv_rate": conv_rate, "linear_rate": linear_rate, "input_rate": input_rate, "output_rate": output_rate}
    rates = {layer: given[name] for layer, name in options.rate_names(structure).items()}
    prior = FixedGates(UnitGating(structure, floor=floor), rates, precision, noise)
    return _weights_only(prior, local_optimiser, server_optimiser, scaffold, top_k, average)


def group_lasso(
    network: Network,
    *,
    strength: options.Strength = 2e-3,
    gate_output: options.GateOutput = False,
    linear_gates: options.LinearGates = "outputs",
    ungated: options.Ungated = (),
    floor: options.Floor = 1,
    local_optimiser: options.LocalOptimiser = SGD,
    server_optimiser: options.ServerOptimiser = None,
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
) -> Algorithm:
    """Group lasso at the client, with its strength as the threshold of both sides."""
    prior = GroupLasso(options.gating(network, True, gate_output, linear_gates, ungated, floor), strength)
    return _weights_only(prior, local_optimiser, server_optimiser, scaffold, top_k)


def spike_slab(
    network: Network,
    *,
    structured: options.Structured = True,
    lambda0: options.Lambda0 = 5e-6,
    precision: options.Precision = 0.0,
    cross_entropy: options.CrossEntropy = 1e-4,
    temperature: options.Temperature = 1e-3,
    theta_start: options.ThetaStart = 0.99,
    prune_below: options.PruneBelow = 0.1,
    dense_rounds: options.DenseRounds = 0,
    prune_server: options.PruneServer = True,
    thresholds: options.Thresholds = "stay",
    relaxation: options.Relaxation = "probability",
    gate_output: options.GateOutput = False,
    linear_gates: options.LinearGates = "outputs",
    ungated: options.Ungated = (),
    floor: options.Floor = 1,
    local_optimiser: options.LocalOptimiser = SGD,
    local_threshold_optimiser: options.LocalThresholdOptimiser = Optimiser.preset("Adamax", lr=1e-3),
    server_optimiser: options.ServerOptimiser = MEAN,
    server_threshold_optimiser: options.ServerThresholdOptimiser = Optimiser.preset("Adamax", lr=1e-2),
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
) -> Algorithm:
    """A spike-and-slab prior over units or, if not structured, over weights; no server optimiser: the closed form."""
    prior = SpikeSlab(
        gating=options.gating(network, structured, gate_output, linear_gates, ungated, floor),
        lambda0=lambda0,
        precision=precision,
        cross_entropy=cross_entropy,
        temperature=temperature,
        theta_start=theta_start,
        prune_below=prune_below,
        dense_rounds=dense_rounds,
        prune_server=prune_server,
        thresholds=thresholds,
        relaxation=relaxation,
    )
    local = {"weights": local_optimiser, "thresholds": local_threshold_optimiser}
    server = {"weights": server_optimiser, "thresholds": server_threshold_optimiser} if server_optimiser else None
    return Algorithm(prior, local, server, _correction(scaffold, top_k, local_optimiser))


def narrow(
    network: Network,
    *,
    structured: options.Structured = True,
    sparsity: options.Sparsity = None,
    max_parameters: options.MaxParameters = None,
    precision: options.Precision = 0.0,
    dense_rounds: options.LaterDenseRounds = None,
    shrink: options.Shrink = None,
    conv_rate: options.DrawnConvRate = 0.0,
    linear_rate: options.DrawnLinearRate = 0.0,
    gate_output: options.GateOutput = False,
    linear_gates: options.LinearGates = "outputs",
    ungated: options.Ungated = (),
    floor: options.Floor = 1,
    local_optimiser: options.LocalOptimiser = SGD,
    server_optimiser: options.ServerOptimiser = None,
    scaffold: options.Scaffold = False,
    top_k: options.TopKShare = None,
    average: options.Average = False,
) -> Algorithm:
    """Gates that the server assigns so that a size is met, not the paper's: nothing is learned about them.

    The size is a sparsity or a number of parameters at most; half of the network if neither is given.
    """
    gating = options.gating(network, structured, gate_output, linear_gates, ungated, floor)
    if max_parameters is not None:
        sparsity = _at_most(max_parameters, gating)
    # Units may close at once: docs/algorithms.md. Single weights are all alike until they are trained, and so are the
    # components of adapters, which all start at zero.
    alike = not structured or bool(find_adapters(network.module))
    dense = (20 if alike else 0) if dense_rounds is None else dense_rounds
    share = (0.05 if dense else 1.0) if shrink is None else shrink
    wanted = 0.5 if sparsity is None else sparsity
    yields = dense_rounds is None and shrink is None
    drawn = options.drawn(gating, conv_rate, linear_rate)
    prior = Narrow(gating, wanted, precision, dense, share, **drawn, yields=yields)
    return _weights_only(prior, local_optimiser, server_optimiser, scaffold, top_k, average)


def bernoulli_mask(
    network: Network,
    *,
    slab_seed: options.SlabSeed = 0,
    cross_entropy: options.PullOfGates = 0.0,
    pseudo_votes: options.PseudoVotes = 1.0,
    model: options.MaskModel = "mean",
    local_optimiser: options.LocalScoreOptimiser = Optimiser.preset("Adam", lr=0.1),
) -> Algorithm:
    """Learned masks over fixed random weights, which never travel; the M-step counts votes."""
    shapes = {name: tuple(value.shape) for name, value in network.params().items()}
    prior = BernoulliMask(WeightGating(shapes), Slab(shapes, slab_seed), cross_entropy, pseudo_votes, model)
    return Algorithm(prior, {"scores": local_optimiser})


def sized_slab(
    network: Network,
    *,
    sparsity: options.Sparsity = None,
    max_parameters: options.MaxParameters = None,
    closing: options.Closing = 0.1,
    recall: options.Recall = 0.8,
    precision: options.Precision = 0.0,
    cross_entropy: options.CrossEntropy = 1e-4,
    temperature: options.Temperature = 1e-3,
    theta_start: options.ThetaStart = 0.99,
    conv_rate: options.DrawnConvRate = 0.0,
    linear_rate: options.DrawnLinearRate = 0.0,
    gate_output: options.GateOutput = False,
    linear_gates: options.LinearGates = "outputs",
    ungated: options.Ungated = (),
    floor: options.Floor = 1,
    local_optimiser: options.LocalOptimiser = SGD,
    local_threshold_optimiser: options.LocalThresholdOptimiser = Optimiser.preset("Adamax", lr=1e-3),
    server_optimiser: options.ServerOptimiser = None,
    top_k: options.TopKShare = None,
    average: options.Average = False,
) -> Algorithm:
    """FedSparse asked for a size: clients vote with gates of their own, and what has the fewest votes is closed.

    The size is a sparsity or a number of parameters at most; half of the network where neither is said.
    """
    gating = options.gating(network, True, gate_output, linear_gates, ungated, floor)
    if max_parameters is not None:
        sparsity = _at_most(max_parameters, gating)
    prior = Sized(
        gating=gating,
        sparsity=0.5 if sparsity is None else sparsity,
        precision=precision,
        **options.drawn(gating, conv_rate, linear_rate),
        closing=closing,
        recall=recall,
        cross_entropy=cross_entropy,
        temperature=temperature,
        theta_start=theta_start,
    )
    local = {"weights": local_optimiser, "thresholds": local_threshold_optimiser}
    votes = Optimiser.preset("SGD", lr=1 - recall)  # one step is the running mean
    server = {"weights": server_optimiser, "votes": votes} if server_optimiser else None
    return Algorithm(prior, local, server, _correction(False, top_k, local_optimiser), average=average)


def _at_most(parameters: int, gating: Gating) -> float:
    """The sparsity that leaves this many parameters."""
    if parameters < 1:
        raise SettingError(f"max_parameters must be at least 1, got {parameters}")
    return max(0.0, 1 - parameters / gating.parameters)


def _weights_only(
    prior: Prior,
    local: Optimiser,
    server: Optimiser | None,
    scaffold: bool,
    top_k: float | None,
    average: bool = False,
) -> Algorithm:
    """An algorithm whose only variables are weights."""
    optimisers = {"weights": server} if server else None
    return Algorithm(prior, {"weights": local}, optimisers, _correction(scaffold, top_k, local), average=average)


def _correction(scaffold: bool, top_k: float | None, local: Optimiser) -> Correction:
    if scaffold and top_k is not None:
        raise SettingError("a client remembers control variates or what it has not sent: give scaffold or top_k")
    if top_k is not None:
        return TopK(top_k)
    if scaffold and local.name != "SGD":
        raise SettingError(
            f"SCAFFOLD derives gradients from the steps of plain SGD, but the local optimiser is {local}"
        )
    return Scaffold() if scaffold else Correction()


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


def run_settings(given: Mapping[str, Any], clients: int = Settings.clients_per_round) -> Settings:
    """Settings of a run from text or values; where there are few clients, cohorts are small by default."""
    for name in given:
        if name not in RUN_OPTIONS:
            raise _unknown(name)
    few = {"clients_per_round": min(Settings.clients_per_round, clients)}
    return Settings(**few | {name: convert(RUN_OPTIONS[name], value) for name, value in given.items()})


def _unknown(name: str) -> SettingError:
    """The error for a name that is no setting of a run; those of an algorithm are given where it is made."""
    for owner in ALGORITHMS:
        if name in algorithm_settings(owner, {}):
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
    built = entry(name).build(network, **resolved)
    built.prior.check()
    gated = hasattr(built.prior, "gating")
    shapes = {key: tuple(value.shape) for key, value in network.params().items()} if gated else None
    return replace(built, name=name, settings=resolved, shapes=shapes)
