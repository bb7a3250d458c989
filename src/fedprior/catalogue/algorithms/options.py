"""What the settings of algorithms are, and when one of them has no effect: the types of their factories' parameters.

Settings that several factories share are in groups: `Training`, `Gates` and `Size`. `idle` gets all settings of an
algorithm as attributes, and the `network`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any

from fedprior.core.adapters import find_adapters
from fedprior.core.errors import SettingError
from fedprior.core.network import Network
from fedprior.core.optimisers import Optimiser
from fedprior.core.options import About, Group
from fedprior.corrections import Correction, Scaffold, TopK
from fedprior.em import Algorithm
from fedprior.priors import Prior
from fedprior.units import Gating, Structure, UnitGating, WeightGating, find_structure


# ---------------------------------------------------------------------- which unit a rate is for
def rate_names(structure: Structure) -> dict[str, str]:
    """The rate that FedDrop has for each gated layer: inputs and outputs have their own."""
    names = {}
    for layer in structure.layers:
        name = f"{layer.kind}_rate" if layer.name not in structure.input_layers else "input_rate"
        names[layer.name] = "output_rate" if layer.name in structure.output_layers else name
    return names


def drawn_kinds(gates: Gating) -> dict[str, str]:
    """For every layer whose units FedNarrow may leave out, whether it is `conv` or `linear`.

    This excludes the output's units, and those of gates on inputs, which may be the data's own.
    """
    if not isinstance(gates, UnitGating):
        return {}
    outputs = gates.structure.output_layers
    return {x.name: x.kind for x in gates.structure.layers if x.axis == 0 and x.name not in outputs}


def drawn(gates: Gating, conv_rate: float, linear_rate: float) -> dict[str, Any]:
    """The settings of a prior that draws the units of each kind at these rates; no kinds if none is ever left out."""
    kinds = drawn_kinds(gates)
    if not any(conv_rate if kind == "conv" else linear_rate for kind in kinds.values()):
        kinds = {}
    return {"conv_rate": conv_rate, "linear_rate": linear_rate, "kinds": kinds}


# ---------------------------------------------------------------------- settings without effect, and why
def _not_of_weights(chosen: Any) -> str:
    return "" if getattr(chosen, "structured", True) else "it concerns units, but here every weight has its own gate"


def _of_layers(chosen: Any) -> str:
    adapted = find_adapters(chosen.network.module) and not _not_of_weights(chosen)
    return "the components of adapters have the gates" if adapted else _not_of_weights(chosen)


def _without_adapters(chosen: Any) -> str:
    return "" if find_adapters(chosen.network.module) else "the network has no adapters: fedprior.adapt makes them"


def _rates(chosen: Any) -> Mapping[str, str]:
    network, gate_output = chosen.network, chosen.output_rate > 0
    return rate_names(find_structure(network.module, network.example, gate_output=gate_output, ungated=chosen.ungated))


def _rate(name: str, layer: str, what: str) -> About:
    """FedDrop's rate of that name, for this kind of layer."""

    def idle(chosen: Any) -> str:
        there = not getattr(chosen, name) or name in _rates(chosen).values()  # a rate of 0 is kept in any case
        return "" if there else f"the network has no gated {layer}"

    return About(f"how often {what} is left out of what a client is sent", idle=idle)


def _drawn_rate(kind: str, layer: str, unit: str) -> About:
    """FedNarrow's rate for that kind of layer."""

    def idle(chosen: Any) -> str:
        gates = Gates(**{one.name: getattr(chosen, one.name) for one in fields(Gates)})
        there = kind in drawn_kinds(gates.gating(chosen.network, getattr(chosen, "structured", True))).values()
        return _not_of_weights(chosen) or ("" if there else f"the network has no {layer} whose units may be left out")

    return About(f"how often a {unit} that is kept is left out of what a client is sent", idle=idle)


def _nothing_dropped(chosen: Any) -> str:
    rates = {getattr(chosen, name) for name in _rates(chosen).values()}
    return "" if any(rates) else "no unit is ever left out; give a rate above 0"


def _solved(chosen: Any) -> str:
    return "" if chosen.server_optimiser else "the closed-form M-step sets the thresholds; give a server_optimiser"


def _said_twice(chosen: Any) -> str:
    return "" if chosen.max_parameters is None else "max_parameters says how large the network is; give one of them"


def _optimised(chosen: Any) -> str:
    return "with a server_optimiser the M-step is a gradient step" if chosen.server_optimiser else ""


def _only_trimmed(chosen: Any) -> str:
    acts = chosen.steps or chosen.precision or chosen.server_optimiser
    return "" if acts else "with steps=0 the M-step is the trimmed mean alone, and clients are not pulled"


def _one_component(chosen: Any) -> str:
    return "" if chosen.components > 1 else "there is only one component"


# ---------------------------------------------------------------------- settings that algorithms share
SGD = Optimiser.preset("SGD", lr=0.05)
Ungated = Annotated[tuple[str, ...], About("names of layers without gates", idle=_not_of_weights)]
Floor = Annotated[int, About("the least number of open gates in a layer")]


@dataclass(frozen=True, kw_only=True)
class Training(Group):
    """How weights are trained by the clients and averaged by the server."""

    local_optimiser: Annotated[Optimiser, About("the clients' optimiser of weights")] = SGD
    server_optimiser: Annotated[
        Optimiser | None, About("the server's optimiser of weights; none: the closed-form M-step")
    ] = None
    top_k: Annotated[
        float | None, About("the share of an upload's entries that is sent, the rest being remembered", unsaid="all")
    ] = None

    def algorithm(
        self,
        prior: Prior,
        *,
        average: bool = False,
        local: Mapping[str, Optimiser] = MappingProxyType({}),
        server: Mapping[str, Optimiser] = MappingProxyType({}),
    ) -> Algorithm:
        """The algorithm of this prior; `local` and `server` have the optimisers of variables beside the weights."""
        steps = {"weights": self.server_optimiser, **server} if self.server_optimiser else None
        return Algorithm(prior, {"weights": self.local_optimiser, **local}, steps, self.correction(), average=average)

    def correction(self) -> Correction:
        """What corrects a client's gradients or its upload."""
        return Correction() if self.top_k is None else TopK(self.top_k)


@dataclass(frozen=True, kw_only=True)
class Corrected(Training):
    """The same, for priors whose gradients control variates can correct."""

    scaffold: Annotated[bool, About("whether control variates correct the clients' gradients")] = False

    def correction(self) -> Correction:
        """Control variates, if asked for; they derive gradients from the steps of plain SGD."""
        if not self.scaffold:
            return super().correction()
        if self.top_k is not None:
            raise SettingError("a client remembers control variates or what it has not sent: give scaffold or top_k")
        if self.local_optimiser.name != "SGD":
            raise SettingError(
                "SCAFFOLD derives gradients from the steps of plain SGD, but the local optimiser is "
                f"{self.local_optimiser}"
            )
        return Scaffold()


@dataclass(frozen=True, kw_only=True)
class Gates(Group):
    """Which parts of the network have gates."""

    gate_output: Annotated[bool, About("whether units of the output have gates", idle=_of_layers)] = False
    linear_gates: Annotated[
        str, About("whether the gates of linear layers are on their `outputs` or `inputs`", idle=_of_layers)
    ] = "outputs"
    ungated: Ungated = ()
    floor: Floor = 1

    def gating(self, network: Network, structured: bool = True) -> Gating:
        """The gates of an algorithm with these settings: one per unit, or one per weight."""
        if not structured:
            return WeightGating(
                {name: tuple(value.shape) for name, value in network.params().items()}, floor=self.floor
            )
        structure = find_structure(
            network.module,
            network.example,
            gate_output=self.gate_output,
            ungated=self.ungated,
            linear_gates=self.linear_gates,
        )
        return UnitGating(structure, floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class Size(Group):
    """How large a network should be; half of it if neither is given."""

    sparsity: Annotated[
        float | None, About("the share of parameters to remove", unsaid="0.5 without max_parameters", idle=_said_twice)
    ] = None
    max_parameters: Annotated[int | None, About("the largest number of parameters")] = None

    def sparsity_of(self, gating: Gating) -> float:
        """The share of these gates' parameters to remove."""
        if self.max_parameters is None:
            return 0.5 if self.sparsity is None else self.sparsity
        if self.max_parameters < 1:
            raise SettingError(f"max_parameters must be at least 1, got {self.max_parameters}")
        return max(0.0, 1 - self.max_parameters / gating.parameters)


# ---------------------------------------------------------------------- settings of one algorithm
Average = Annotated[bool, About("whether the server ships the average of its last rounds, not the last one")]
OfProducts = Annotated[
    bool, About("whether an adapter's mean is that of its products B A, not of its factors", idle=_without_adapters)
]
Precision = Annotated[float, About("λ, the pull of a client's weights towards the server's")]
Examples = Annotated[float, About("N, how many examples the posterior is of: those of all clients")]
Decay = Annotated[float, About("δ, the precision per example of the fixed prior around zero")]
Curvature = Annotated[float, About("h₀, the curvature of the loss that is assumed at the start")]
LocalPrecisionOptimiser = Annotated[Optimiser, About("the clients' optimiser of the precisions' logarithms")]
Freedom = Annotated[float, About("ν, the degrees of freedom: the smaller, the heavier the tails", idle=_only_trimmed)]
Scale = Annotated[float, About("s, the distance of a weight that is usual among clients", idle=_only_trimmed)]
Trim = Annotated[float, About("the share of a cohort that is cut off at each end of every weight", idle=_optimised)]
Steps = Annotated[int, About("how often the M-step weighs its mean anew", idle=_optimised)]
Components = Annotated[int, About("K, the number of models that the server has")]
Spread = Annotated[float, About("how far apart the components start; 1: as initialisations do", idle=_one_component)]
Strength = Annotated[float, About("the strength of the group lasso, and the threshold on both sides")]
ConvRate = Annotated[float, _rate("conv_rate", "convolution between its input and its output", "a filter")]
LinearRate = Annotated[float, _rate("linear_rate", "linear layer between its input and its output", "a neuron")]
InputRate = Annotated[float, _rate("input_rate", "layer that reads the input", "a unit that reads the input")]
OutputRate = Annotated[float, About("the same for a unit of the output")]
Noise = Annotated[bool, About("whether clients also use dropout, at the same rates", idle=_nothing_dropped)]
Structured = Annotated[bool, About("whether each gate is on a unit, or on a single weight")]
Lambda0 = Annotated[float, About("λ₀, what an active parameter costs")]
CrossEntropy = Annotated[float, About("κ, how strongly the server's gates pull a client's")]
Temperature = Annotated[float, About("T, the temperature of the gates' probabilities")]
ThetaStart = Annotated[float, About("the gates' probability at the start")]
PruneBelow = Annotated[float, About("the probability below which a gate is closed")]
DenseRounds = Annotated[int, About("rounds before the first gate closes")]
PruneServer = Annotated[bool, About("whether the server prunes its own model")]
Thresholds = Annotated[
    str, About("whether thresholds `stay` or `follow` when the server's step moves the weights", idle=_solved)
]
Relaxation = Annotated[
    str,
    About(
        "whether a gate's logit is that of its relaxation's `probability` to be above zero, or its `location`",
        ("probability", "location"),
    ),
]
LocalThresholdOptimiser = Annotated[Optimiser, About("the clients' optimiser of thresholds")]
ServerThresholdOptimiser = Annotated[Optimiser, About("the server's optimiser of thresholds", idle=_solved)]
SlabSeed = Annotated[int, About("the seed of the fixed random weights, the same for every client")]
LocalScoreOptimiser = Annotated[Optimiser, About("the clients' optimiser of the log-odds of weights")]
PseudoVotes = Annotated[float, About("how many undecided clients vote in every round as well")]
MaskModel = Annotated[
    str, About("the server's network: `mean`, every weight times its probability, or `mode`, the likelier mask")
]
PullOfGates = Annotated[float, About("κ, how much a client's probabilities heed the server's")]
LaterDenseRounds = Annotated[
    int | None,
    About("rounds before the first gate closes", unsaid="0; of single weights and components 20"),
]
Shrink = Annotated[
    float | None,
    About("the largest share of the network to remove in a round", unsaid="1; after dense rounds 0.05"),
]
Closing = Annotated[float, About("the share of rounds in which gates close, before the size is met")]
Recall = Annotated[float, About("how much of the votes of earlier rounds counts beside a round's")]
DrawnConvRate = Annotated[float, _drawn_rate("conv", "convolution", "filter")]
DrawnLinearRate = Annotated[float, _drawn_rate("linear", "linear layer", "neuron")]
