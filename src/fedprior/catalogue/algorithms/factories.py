"""Factories of algorithms. Each makes a prior of its keyword parameters, and says how the M-step is taken."""

from fedprior.catalogue.algorithms import options
from fedprior.catalogue.algorithms.options import Corrected, Gates, Size, Training
from fedprior.core.adapters import find_adapters
from fedprior.core.errors import SettingError
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser
from fedprior.em import Algorithm
from fedprior.priors import (
    BernoulliMask,
    Distance,
    FixedGates,
    Gaussian,
    GroupLasso,
    Laplace,
    Mixture,
    Narrow,
    Products,
    Sized,
    SpikeSlab,
    StudentT,
)
from fedprior.priors.bernoulli_mask import Slab
from fedprior.units import UnitGating, WeightGating, find_structure

MEAN = Optimiser.preset("SGD", lr=1.0)
"""One step of length one reaches the mean; for weights beside variables that need their gradient."""
GATES, SIZE, TRAINING, CORRECTED = Gates(), Size(), Training(), Corrected()


def gaussian(
    network: Network,
    *,
    precision: options.Precision = 0.0,
    training: Corrected = CORRECTED,
    average: options.Average = False,
    products: options.OfProducts = False,
) -> Algorithm:
    """A Gaussian prior of precision λ; without a server optimiser the M-step is the mean."""
    prior = Gaussian(precision)
    if products:
        if training.server_optimiser:
            raise SettingError("products=true is a closed-form M-step: leave out server_optimiser")
        prior = Products(precision, find_adapters(network.module))
    return training.algorithm(prior, average=average)


def laplace(
    network: Network,
    *,
    precision: options.Precision = 1e-3,
    training: Corrected = CORRECTED,
) -> Algorithm:
    """A Laplace prior of precision λ; without a server optimiser the M-step is the median, with one a sign gradient."""
    return training.algorithm(Laplace(precision))


def student_t(
    network: Network,
    *,
    freedom: options.Freedom = 3.0,
    scale: options.Scale = 0.003,
    trim: options.Trim = 0.25,
    steps: options.Steps = 10,
    precision: options.Precision = 0.0,
    training: Corrected = CORRECTED,
) -> Algorithm:
    """A Student-t prior; without a server optimiser the M-step is a mean weighed anew, from the trimmed mean."""
    return training.algorithm(StudentT(freedom, scale, trim, steps, precision))


def distance(
    network: Network,
    *,
    precision: options.Precision = 0.0,
    steps: options.Steps = 16,
    training: Corrected = CORRECTED,
) -> Algorithm:
    """A Laplace prior of a client's whole distance; without a server optimiser the M-step is the geometric median."""
    return training.algorithm(Distance(precision, steps))


def mixture(
    network: Network,
    *,
    components: options.Components = 3,
    precision: options.Precision = 0.1,
    spread: options.Spread = 0.1,
    training: Corrected = CORRECTED,
) -> Algorithm:
    """A mixture of Gaussians; without a server optimiser the M-step is the responsibility-weighted mean."""
    return training.algorithm(Mixture(components, precision, spread))


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
    training: Corrected = CORRECTED,
    average: options.Average = False,
) -> Algorithm:
    """Gates with fixed dropout rates; a layer that reads the input or feeds the output has a rate of its own."""
    structure = find_structure(network.module, network.example, gate_output=output_rate > 0, ungated=ungated)
    given = {"conv_rate": conv_rate, "linear_rate": linear_rate, "input_rate": input_rate, "output_rate": output_rate}
    rates = {layer: given[name] for layer, name in options.rate_names(structure).items()}
    prior = FixedGates(UnitGating(structure, floor=floor), rates, precision, noise)
    return training.algorithm(prior, average=average)


def group_lasso(
    network: Network,
    *,
    strength: options.Strength = 2e-3,
    gates: Gates = GATES,
    training: Corrected = CORRECTED,
) -> Algorithm:
    """Group lasso at the client, with its strength as the threshold of both sides."""
    prior = GroupLasso(gates.gating(network), strength)
    return training.algorithm(prior)


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
    gates: Gates = GATES,
    training: Corrected = Corrected(server_optimiser=MEAN),
    local_threshold_optimiser: options.LocalThresholdOptimiser = Optimiser.preset("Adamax", lr=1e-3),
    server_threshold_optimiser: options.ServerThresholdOptimiser = Optimiser.preset("Adamax", lr=1e-2),
) -> Algorithm:
    """A spike-and-slab prior over units or, if not structured, over weights; no server optimiser: the closed form."""
    prior = SpikeSlab(
        gating=gates.gating(network, structured),
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
    return training.algorithm(
        prior, local={"thresholds": local_threshold_optimiser}, server={"thresholds": server_threshold_optimiser}
    )


def narrow(
    network: Network,
    *,
    structured: options.Structured = True,
    size: Size = SIZE,
    precision: options.Precision = 0.0,
    dense_rounds: options.LaterDenseRounds = None,
    shrink: options.Shrink = None,
    conv_rate: options.DrawnConvRate = 0.0,
    linear_rate: options.DrawnLinearRate = 0.0,
    gates: Gates = GATES,
    training: Corrected = CORRECTED,
    average: options.Average = False,
) -> Algorithm:
    """Gates that the server assigns so that a size is met, not the paper's: nothing is learned about them.

    The size is a sparsity or a number of parameters at most; half of the network if neither is given.
    """
    gating = gates.gating(network, structured)
    # Units may close at once: docs/algorithms.md. Single weights are all alike until they are trained, and so are the
    # components of adapters, which all start at zero.
    alike = not structured or bool(find_adapters(network.module))
    dense = (20 if alike else 0) if dense_rounds is None else dense_rounds
    share = (0.05 if dense else 1.0) if shrink is None else shrink
    yields = dense_rounds is None and shrink is None
    drawn = options.drawn(gating, conv_rate, linear_rate)
    prior = Narrow(gating, size.sparsity_of(gating), precision, dense, share, **drawn, yields=yields)
    return training.algorithm(prior, average=average)


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
    size: Size = SIZE,
    closing: options.Closing = 0.1,
    recall: options.Recall = 0.8,
    precision: options.Precision = 0.0,
    cross_entropy: options.CrossEntropy = 1e-4,
    temperature: options.Temperature = 1e-3,
    theta_start: options.ThetaStart = 0.99,
    conv_rate: options.DrawnConvRate = 0.0,
    linear_rate: options.DrawnLinearRate = 0.0,
    gates: Gates = GATES,
    training: Training = TRAINING,
    local_threshold_optimiser: options.LocalThresholdOptimiser = Optimiser.preset("Adamax", lr=1e-3),
    average: options.Average = False,
) -> Algorithm:
    """FedSparse asked for a size: clients vote with gates of their own, and what has the fewest votes is closed.

    The size is a sparsity or a number of parameters at most; half of the network where neither is said.
    """
    gating = gates.gating(network)
    prior = Sized(
        gating=gating,
        sparsity=size.sparsity_of(gating),
        precision=precision,
        **options.drawn(gating, conv_rate, linear_rate),
        closing=closing,
        recall=recall,
        cross_entropy=cross_entropy,
        temperature=temperature,
        theta_start=theta_start,
    )
    return training.algorithm(
        prior,
        average=average,
        local={"thresholds": local_threshold_optimiser},
        server={"votes": Optimiser.preset("SGD", lr=round(1 - recall, 12))},  # one step is the running mean
    )
