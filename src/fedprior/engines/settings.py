"""How to run, whatever the algorithm; and the simulation that these settings describe."""

from dataclasses import dataclass, replace

import torch

from fedprior.core.errors import SettingError
from fedprior.core.federated import FederatedData
from fedprior.core.network import Network
from fedprior.core.schedules import Rates
from fedprior.core.trainable import check_statistics, check_trainable
from fedprior.core.weighting import KINDS as WEIGHTINGS
from fedprior.core.weighting import check_takes_weight
from fedprior.em import Algorithm, Statistics
from fedprior.engines import ranks
from fedprior.engines.arithmetic import KINDS
from fedprior.engines.attack import ATTACKS
from fedprior.engines.batches import Schedule
from fedprior.engines.loop.round import Simulation, simulation
from fedprior.engines.modes import MODES, mode_of
from fedprior.wire import Wire


@dataclass(frozen=True)
class Settings:
    """How to run, whatever the algorithm."""

    rounds: int = 100
    seed: int = 0
    clients_per_round: int = 10
    batch_size: int = 10
    epochs: int = 1
    local_steps: int | None = None
    """Local steps a round, instead of epochs."""
    evaluate_every: int = 5
    """Evaluate the server every so many rounds, and after the last."""
    checkpoint_every: int | None = None
    """Save a checkpoint every so many rounds; none: about every 20 seconds."""
    mode: str = "auto"
    """Clients `in-turn`, `vectorised`, or `captured`, which is vectorised in a CUDA graph; auto: the fastest here."""
    workers: int | None = None
    """Clients in turn that train side by side on a CPU, a core each; none: as many as torch has threads."""
    device: str = "auto"
    arithmetic: str = "tf32"
    """How a GPU multiplies: `tf32`, on its tensor cores, or `float32`, in full single precision."""
    data: str = "auto"
    """Where examples are kept: on the `device`, or on the `host`, from where each cohort's are copied; auto: on the
    device if they take less than 60% of its free memory."""
    wire: str = "float32"
    """What messages are rounded to: float32 (not at all), float16, bfloat16, int8 or int4; or DOWN/UP, as int8/int4."""
    entropy: bool = True
    """Whether int8 and int4 are written in a code of variable length, where that makes a message shorter."""
    messages: str = "auto"
    """`encode` every message to bytes and back, or only `count` its length; auto: encode when clients train in turn."""
    weighting: str = "examples"
    """What a client counts for in the M-step: its number of `examples`, or all are `equal`, as in the paper."""
    lr_schedule: str = "constant"
    """What becomes of the clients' learning rates from round to round, as `cosine(end=0.01, warmup=10)`; see
    `schedules.py`."""
    server_lr_schedule: str = "constant"
    """The same of those of the server's optimisers."""
    statistics: str = "shared"
    """Of a network with BatchNorm: `shared` travel and are pooled, `local` stay with each client, `batch`: there are
    none but those of the batch at hand."""
    report_statistics: str = "received"
    """Which of them a client reports: those of the model it `received`, of the one it ends with (`final`), or its
    `running` averages."""
    statistics_momentum: float = 1.0
    """How much of a round's statistics the server takes over."""
    patience: int | None = None
    """Stop after so many evaluations without a better one; none: never."""
    keep: str = "last"
    """`best`: keep the model of the best evaluation as well."""
    by: str = "auto"
    """What an evaluation is better by: a field of the records, `-NAME` if less is better; auto: global_accuracy, or
    global_loss where there is none."""
    attack: str = "none"
    """What hostile clients do: sign-flip, scale or constant."""
    attackers: float = 0.0
    """The share of clients that are hostile."""

    def __post_init__(self) -> None:
        for name in ("rounds", "clients_per_round", "batch_size", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.keep not in ("last", "best"):
            raise SettingError(f"keep must be last or best, got {self.keep!r}")
        for name in ("local_steps", "checkpoint_every", "workers", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mode not in ("auto", *MODES):
            raise SettingError(f"mode must be auto, {', '.join(MODES[:-1])} or {MODES[-1]}, got {self.mode!r}")
        if self.arithmetic not in KINDS:
            raise SettingError(f"arithmetic must be {' or '.join(KINDS)}, got {self.arithmetic!r}")
        if self.data not in ("auto", "device", "host"):
            raise SettingError(f"data must be auto, device or host, got {self.data!r}")
        Wire.of(self.wire)
        Rates(self.lr_schedule, self.server_lr_schedule)
        if self.weighting not in WEIGHTINGS:
            raise SettingError(f"weighting must be {' or '.join(WEIGHTINGS)}, got {self.weighting!r}")
        self.norm_statistics()
        if self.messages not in ("auto", "encode", "count"):
            raise SettingError(f"messages must be auto, encode or count, got {self.messages!r}")
        if self.messages == "encode" and self.mode not in ("auto", "in-turn"):
            raise SettingError(
                "messages are encoded only when clients train in turn: leave out messages, or set mode=in-turn"
            )
        if self.attack not in ("none", *ATTACKS):
            raise SettingError(f"attack must be none, {', '.join(ATTACKS)}, got {self.attack!r}")
        if not 0 <= self.attackers < 1:
            raise SettingError(f"attackers must be at least 0 and below 1, got {self.attackers}")
        if self.attack == "none" and self.attackers > 0:
            raise SettingError(f"attackers={self.attackers} need an attack: {', '.join(ATTACKS)}")
        if not -(2**63) <= self.seed < 2**63:
            raise SettingError(f"seed must fit in 64 bits, got {self.seed}")

    @property
    def rates(self) -> Rates:
        """What becomes of the learning rates."""
        return Rates(self.lr_schedule, self.server_lr_schedule, self.rounds)

    def check_schedules(self, algorithm: Algorithm) -> None:
        """Refuse schedules of what has no learning rate."""
        if self.server_lr_schedule != "constant" and algorithm.server is None:
            raise SettingError(
                f"server_lr_schedule={self.server_lr_schedule}: the M-step of {algorithm.name} has no learning rate; "
                "give it a server_optimiser, such as SGD(lr=1.0), which is the mean"
            )
        for text, optimisers in ((self.lr_schedule, algorithm.local), (self.server_lr_schedule, algorithm.server)):
            if text != "constant" and any(optimiser.name == "Rprop" for optimiser in (optimisers or {}).values()):
                raise SettingError(f"Rprop chooses its own steps: no schedule, {text}, can change them")

    def on_wire(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm as these settings say: how precise its messages are, its statistics, how many rounds it has."""
        fitted = algorithm.prior.fit(self.rounds)
        return replace(
            algorithm, prior=fitted, wire=Wire.of(self.wire, self.entropy), statistics=self.norm_statistics()
        )

    def norm_statistics(self) -> Statistics:
        """What becomes of a network's statistics."""
        return Statistics(self.statistics, self.report_statistics, self.statistics_momentum)

    def resolved_device(self) -> torch.device:
        """The device to run on."""
        if self.device == "auto":
            return ranks.gpu() if torch.cuda.is_available() else torch.device("cpu")
        try:
            device = ranks.gpu() if self.device == "cuda" and torch.cuda.is_available() else torch.device(self.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise SettingError(f"device {self.device!r} is not available here") from error
        return device


def check_cohort(settings: Settings, clients: int) -> None:
    """Refuse cohorts that are larger than the population, and attackers that are none."""
    if settings.clients_per_round > clients:
        raise SettingError(f"clients_per_round is {settings.clients_per_round}, but there are only {clients} clients")
    if settings.attackers and not round(settings.attackers * clients):
        raise SettingError(f"attackers={settings.attackers} of {clients} clients is nobody: give a larger share")


def _check_unjudged(settings: Settings) -> None:
    """Without test examples no evaluation is better than another."""
    judged = settings.by == "auto" or settings.by.lstrip("-").startswith(("global_", "local_"))
    if judged and (settings.patience or settings.keep == "best"):
        what = "patience" if settings.patience else "keep=best"
        raise SettingError(f"{what} needs test examples, (x, y, test_x, test_y) a client: there are none to judge by")


def build(algorithm: Algorithm, network: Network, data: FederatedData, settings: Settings) -> Simulation:
    """The simulation of a run before its first round."""
    check_trainable(network.module)
    check_statistics(network.module, settings.statistics)
    algorithm.check(network.params())
    check_cohort(settings, data.clients)
    settings.check_schedules(algorithm)
    if not len(data.test_y):
        _check_unjudged(settings)
    if settings.weighting == "examples" and len(set(data.train.sizes)) > 1:
        check_takes_weight(algorithm.prior)
    device = settings.resolved_device()
    schedule = Schedule(settings.batch_size, settings.epochs, settings.local_steps)
    built = simulation(
        settings.on_wire(algorithm),
        network,
        data,
        schedule,
        clients_per_round=settings.clients_per_round,
        seed=settings.seed,
        workers=1 if device.type != "cpu" else settings.workers or torch.get_num_threads(),
        encode=settings.messages != "count",
        attack=settings.attack,
        attackers=settings.attackers,
        device=device,
        arithmetic=settings.arithmetic,
        weighting=settings.weighting,
        rates=settings.rates,
        streamed=settings.data == "host" or (settings.data == "auto" and not data.fits(device)),
    )
    mode_of(settings.mode, settings.messages, built)  # refuses what cannot be, before anything is written
    return built
