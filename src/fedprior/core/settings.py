"""How to run, whatever the algorithm: every setting of a run, and what it is. Plain data; needs no torch."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fedprior.core import no_effect as why
from fedprior.core.choices import ATTACKS, MODES, directions
from fedprior.core.errors import SettingError
from fedprior.core.options import About, either, options_of, plain
from fedprior.core.schedules import Rates


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run, whatever the algorithm."""

    rounds: Annotated[int, About("how many rounds to train", least=1, extends=True)] = 100
    seed: Annotated[int, About("the seed of everything random")] = 0
    clients_per_round: Annotated[int, About("how many clients train in a round", least=1)] = 10
    batch_size: Annotated[int, About("examples in a batch of a client", least=1)] = 10
    epochs: Annotated[int, About("passes over a client's examples in a round", least=1, idle=why.overruled)] = 1
    local_steps: Annotated[int | None, About("this many batches in a round instead of epochs", least=1)] = None
    evaluate_every: Annotated[
        int,
        About("rounds between evaluations of the server; the last round is always evaluated", least=1, extends=True),
    ] = 5
    checkpoint_every: Annotated[
        int | None,
        About("rounds between checkpoints; none: about every 20 seconds", least=1, machine=True, simulated=True),
    ] = None
    keep_checkpoints: Annotated[
        int,
        About("how many of the last checkpoints are kept, to [go back](#go-back) to", least=1, machine=True),
    ] = 3
    keep_every: Annotated[
        int | None,
        About("the checkpoint of every so many rounds is made and kept, too; none: of no more", least=1, machine=True),
    ] = None
    mode: Annotated[
        str,
        About(
            "clients `in-turn` (the default on a CPU), `vectorised` over the cohort, or `captured`: vectorised, a "
            "round as one CUDA graph (the default on a GPU); auto: the fastest here",
            ("auto", *MODES),
            machine=True,
            simulated=True,
        ),
    ] = "auto"
    workers: Annotated[
        int | None,
        About(
            "how many clients train side by side on a CPU, one core each, when clients train in turn; none: as many as "
            "torch has threads",
            least=1,
            machine=True,
            simulated=True,
        ),
    ] = None
    device: Annotated[str, About("where to compute: auto, cpu, cuda, cuda:1, …", machine=True)] = "auto"
    arithmetic: Annotated[
        str,
        About(
            "how a GPU multiplies: `tf32`, convolutions and matrix products on its tensor cores with 10 bits of "
            "mantissa, sums in single precision, or `float32`, single precision throughout; nothing changes on a CPU "
            "or in double precision",
            ("tf32", "float32"),
            machine=True,
            simulated=True,
        ),
    ] = "tf32"
    data: Annotated[
        str,
        About(
            "where examples are kept: on the `device`, or on the `host`, from where each cohort's are copied; auto: on "
            "the device if they take less than 60% of its free memory: [performance.md](performance.md#scale)",
            ("auto", "device", "host"),
            machine=True,
            simulated=True,
        ),
    ] = "auto"
    wire: Annotated[
        str,
        About(
            "precision of messages: `float32`, `float16`, `bfloat16`, `int8`, `int4`, or `DOWN/UP` such as "
            "`int8/int4`: [wire.md](wire.md#precision)"
        ),
    ] = "float32"
    entropy: Annotated[
        bool,
        About("int8 and int4 in a code of variable length, where that makes a message shorter", idle=why.not_coded),
    ] = True
    messages: Annotated[
        str,
        About(
            "`encode` every message to bytes and back, or only `count` its length, which is the same; auto: encode "
            "when clients train in turn, else count",
            ("auto", "encode", "count"),
            machine=True,
            simulated=True,
        ),
    ] = "auto"
    weighting: Annotated[
        str,
        About(
            "how much a client counts at the server: by its number of `examples`, or all `equal`, as in the paper: "
            "[algorithms.md](algorithms.md#what-a-client-counts-for)",
            ("examples", "equal"),
        ),
    ] = "examples"
    bound: Annotated[
        float,
        About(
            "how many times as far from the server's state as usual an upload may be, where a step back counts 2.5 "
            "times; one that is farther, or not finite, is left out and its client named in the record; 0: any: "
            "[algorithms.md](algorithms.md#uploads-that-are-left-out)",
            least=0,
            idle=why.private,
        ),
    ] = 8.0
    clip: Annotated[
        float | None,
        About(
            "the largest distance of an upload from the server's weights; one that is farther is drawn in to it; "
            "none: no bound, or 1 in a private run: [privacy.md](privacy.md)",
            above=0,
        ),
    ] = None
    clip_quantile: Annotated[
        float | None,
        About(
            "let the clip follow this quantile of the uploads' distances, so that `clip` is the first round's only; "
            "none: a fixed clip: [privacy.md](privacy.md#a-clip-that-adapts)",
            above=0,
            below=1,
            idle=why.not_clipped,
        ),
    ] = None
    epsilon: Annotated[
        float | None,
        About(
            "the budget of [differential privacy](privacy.md) of every client: uploads are clipped, their sum has "
            "noise, cohorts are Poisson samples, and clients count equally; at most 100; none: no budget, and not "
            "private unless `noise_multiplier` is given",
            above=0,
        ),
    ] = None
    noise_multiplier: Annotated[
        float | None,
        About(
            "the noise of a round as a multiple of `clip`; without `epsilon` the run is private with no budget, and "
            "the records say what it has spent; none: the least that `epsilon` allows",
            least=0,
        ),
    ] = None
    delta: Annotated[
        float, About("in private, δ: less than one over the number of clients", above=0, below=1, idle=why.public)
    ] = 1e-5
    lr_schedule: Annotated[
        str,
        About(
            "how the clients' learning rates change from round to round: [below](#learning-rates-by-the-round)",
            idle=why.no_rate,
        ),
    ] = "constant"
    server_lr_schedule: Annotated[
        str, About("the same for those of the server's optimisers", idle=why.no_server_rate)
    ] = "constant"
    statistics: Annotated[
        str,
        About(
            "for a network with BatchNorm: `shared` statistics travel and are pooled, `local` ones stay with each "
            "client; `batch`: only the current batch's are used: [batchnorm.md](batchnorm.md)",
            ("shared", "local", "batch"),
            idle=why.without_norms,
        ),
    ] = "shared"
    report_statistics: Annotated[
        str,
        About(
            "which statistics a client reports: of the model it `received`, the `final` one, or `running` averages",
            ("received", "running", "final"),
            idle=why.not_reported,
        ),
    ] = "received"
    statistics_momentum: Annotated[
        float, About("how much of a round's statistics the server adopts", above=0, most=1, idle=why.not_pooled)
    ] = 1.0
    metrics: Annotated[
        tuple[str, ...],
        About(
            "what an evaluation measures besides loss and accuracy, by name: of probabilities `nll`, `ece` and "
            "`brier`, and what you add: [below](#probabilities)",
            machine=True,
        ),
    ] = ("nll", "ece", "brier")
    unseen: Annotated[
        float,
        About(
            "the share of clients that never take part; evaluations tell how the server's model serves them, as it is "
            "and after a newcomer's E-step: [below](#clients-that-never-took-part)",
            least=0,
            below=1,
            simulated=True,
            idle=why.nobody_unseen,
        ),
    ] = 0.0
    patience: Annotated[
        int | None,
        About(
            "stop after this many evaluations without a better one; none: never",
            least=1,
            simulated=True,
            idle=why.unjudged,
        ),
    ] = None
    keep: Annotated[
        str,
        About(
            "`best`: keep the model of the best evaluation as well",
            ("last", "best"),
            simulated=True,
            idle=why.unjudged,
        ),
    ] = "last"
    by: Annotated[
        str,
        About(
            "the field of the records by which evaluations are compared; `-NAME` if less is better (assumed for a "
            "loss, an error, `nll`, `ece` and `brier`); auto: `global_accuracy`, or `global_loss` where there is none",
            simulated=True,
            idle=why.nothing_judged,
        ),
    ] = "auto"
    attack: Annotated[
        str,
        About(
            f"what hostile clients do: {either(ATTACKS)}",
            ("none", *ATTACKS),
            simulated=True,
            idle=why.unused_attack,
        ),
    ] = "none"
    attackers: Annotated[
        float, About("the share of clients that are hostile", least=0, below=1, simulated=True, idle=why.nobody)
    ] = 0.0

    def __post_init__(self) -> None:
        for name, option in RUN_OPTIONS.items():
            option.about.check(name, getattr(self, name))
        directions(self.wire)
        if not -(2**63) <= self.seed < 2**63:
            raise SettingError(f"seed must fit in 64 bits, got {self.seed}")
        if 0 < self.bound < 1:
            raise SettingError(f"bound must be 0 or at least 1, got {self.bound}: it would leave out what is usual")
        assert self.rates
        if self.messages == "encode" and self.mode not in ("auto", "in-turn"):
            raise SettingError(
                "messages are encoded only when clients train in turn: leave out messages, or set mode=in-turn"
            )

    @property
    def private(self) -> bool:
        """Whether every client has differential privacy."""
        return self.epsilon is not None or self.noise_multiplier is not None

    @property
    def largest(self) -> float:
        """The clip of a private run."""
        return 1.0 if self.clip is None else self.clip

    @property
    def rates(self) -> Rates:
        """How the learning rates change over a run."""
        return Rates(self.lr_schedule, self.server_lr_schedule, self.rounds)

    def recorded(self) -> dict[str, Any]:
        """What a run's config says; settings that are None are left out."""
        return {name: plain(value) for name, value in asdict(self).items() if value is not None}


RUN_OPTIONS = options_of(Settings)
BEFORE = {"weighting": "equal", "metrics": (), "bound": 0.0}
"""The behaviour of runs whose config is older than a setting, if it differs from the setting's default."""
MACHINE = frozenset({name for name, option in RUN_OPTIONS.items() if option.about.machine} | {"data_dir"})
"""Settings that say where and how a run is computed, not what. Tasks have only `data_dir`, where their data lies."""
SIMULATED = frozenset(name for name, option in RUN_OPTIONS.items() if option.about.simulated)
EXTENDS = frozenset(name for name, option in RUN_OPTIONS.items() if option.about.extends)
