"""What the server and every client agree on: the network, algorithm and settings from a Flower app's run config."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from fedprior.catalogue.algorithms import algorithm as named_algorithm
from fedprior.catalogue.algorithms import run_settings
from fedprior.catalogue.tasks.base import check_metrics, examined, outside
from fedprior.core.errors import DataError, SettingError
from fedprior.core.federated import ClientData, FederatedData
from fedprior.core.inputs import as_inputs
from fedprior.core.network import Loss, Metric, Network, Whole, cross_entropy
from fedprior.core.options import Option, convert
from fedprior.core.settings import MACHINE, SIMULATED, Settings
from fedprior.em import Algorithm
from fedprior.engines.batches import Workload
from fedprior.engines.build import applied, check_run, check_useful
from fedprior.engines.privacy import with_noise
from fedprior.runs.asked import assemble, frozen_table, made, setting_tables, sort_settings
from fedprior.version import __version__


@dataclass(frozen=True)
class Job:
    """One federated training job, as both ends see it."""

    task: str
    network: Network
    algorithm: Algorithm
    settings: Settings
    clients: int
    """The number of clients, connected or not; they are numbered from 0."""
    data: FederatedData | None = None
    """A named task's data, of which each client takes its own part; None if clients bring their own."""
    test: FederatedData | None = None
    """What the server tests its model on, if it has test examples."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How a named task was built, for the run's config."""

    def __post_init__(self) -> None:
        check_run(self.settings, self.algorithm, self.network, self.clients, uneven=True)
        object.__setattr__(self, "algorithm", applied(self.settings, self.algorithm))

    @property
    def workload(self) -> Workload:
        """How long a client trains."""
        return Workload.of(self.settings)

    def check_client(self, client: int) -> None:
        """Refuse a number that belongs to no client."""
        if not 0 <= client < self.clients:
            raise DataError(f"this node says it is client {client}, but the job's clients are 0 to {self.clients - 1}")

    def part(self, client: int) -> ClientData:
        """Return a client's part of a named task's data, in the simulator's order."""
        self.check_client(client)
        if self.data is None:
            raise DataError("this job has no data of its own; the app must load each client's")
        train, test = self.data.train[client], self.data.test[client]
        return self.data.x[train], self.data.y[train], self.data.test_x[test], self.data.test_y[test]

    def examples(self, clients: list[ClientData], network: Network) -> FederatedData:
        """Build a dataset from outside examples. Whole-number targets must be labels only with the default loss."""
        if self.data is not None:
            return FederatedData.from_clients(clients, classes=self.data.classes, min_examples=1)
        return outside(clients, network)

    def config(self) -> dict[str, dict[str, Any]]:
        """Return what a run's config.toml says about the job."""
        chosen = {key: value for key, value in self.settings.recorded().items() if key not in SIMULATED}
        name, own = self.algorithm.name, self.algorithm.recorded()
        held = setting_tables(self.task, name, name, run=chosen, task_settings=self.options, algorithm_settings=own)
        return {**held, **frozen_table(self.network.module), **made()}

    def agreed(self) -> dict[str, str]:
        """Return what the server and a device must have in common, in words: the version first, then every setting."""
        config, own = self.config(), {"evaluate_every", *MACHINE}  # these are everybody's own affair
        agreed = {"fedprior": __version__, "algorithm": self.algorithm.name, "task": self.task}
        for table in ("run", "algorithm", "task"):
            named = {f"the {table}'s {key}" if key in agreed else key: value for key, value in config[table].items()}
            agreed |= {key: json.dumps(value) for key, value in named.items() if key not in own}
        if "frozen" in config:
            agreed["frozen weights"] = config["frozen"]["fingerprint"]
        return agreed


@dataclass(frozen=True)
class Limits:
    """How long the server waits, and for how many clients."""

    round_seconds: float = 600.0
    """A client that has not answered by then is left out."""
    min_replies: int = 0
    """How many good replies an M-step needs; 0 means half of the cohort."""
    attempts: int = 3
    """How many times the server asks for replies before the run stops."""
    wait_for: int = 0
    """How many clients must be connected before the first round; 0 means a cohort."""
    start_seconds: float = 300.0
    """How long to wait for them, and later for `min_replies` of them."""
    over_select: float = 0.0
    """How many clients a round asks beyond its cohort, as a share of it, so that it need not wait for the slowest."""
    aggregate_at: float = 1.0
    """The share of the cohort whose good replies close the round; the work of the others is then not used."""
    poll_seconds: float = 1.0
    keep_megabytes: float = 512.0
    """If the uploads of a cohort take more, each is folded into the M-step when it arrives, where that is made of sums;
    if they take less, all are kept until the round closes, and the result is the simulator's to the last bit."""
    max_examples: int = 1_000_000
    """The most examples a client may claim: with `weighting=examples`, its upload counts that many times."""
    max_loss: float = 1e6
    """The largest loss or score, up or down, that a client may report; it is averaged into the record."""
    quarantine_after: int = 5
    """After how many useless answers in a row a node is not asked any more; 0 means never."""

    def __post_init__(self) -> None:
        for name in ("round_seconds", "start_seconds", "poll_seconds", "attempts", "max_examples", "max_loss"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        for name in ("min_replies", "wait_for", "quarantine_after", "over_select", "keep_megabytes"):
            if not getattr(self, name) >= 0:
                raise SettingError(f"{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if not 0 < self.aggregate_at <= 1:
            raise SettingError(f"aggregate-at must be above 0 and at most 1, got {self.aggregate_at}")

    def needed(self, cohort: int) -> int:
        """Return how many good replies a round needs with a cohort of this size."""
        if self.min_replies > cohort:
            raise SettingError(f"min-replies is {self.min_replies}, but a cohort has only {cohort} clients")
        if self.min_replies > self.enough(cohort):
            raise SettingError(
                f"aggregate-at={self.aggregate_at:g} closes a round with {self.enough(cohort)} replies, "
                f"but min-replies is {self.min_replies}"
            )
        return self.min_replies or min(-(-cohort // 2), self.enough(cohort))

    def enough(self, cohort: int) -> int:
        """Return how many good replies close a round at once."""
        return math.ceil(round(self.aggregate_at * cohort, 9))

    def asked(self, cohort: int) -> int:
        """Return how many clients to ask so that a cohort of this size answers in time."""
        return math.ceil(round((1 + self.over_select) * cohort, 9))

    def check(self, job: Job) -> None:
        """Refuse limits that do not fit the job."""
        cohort = job.settings.clients_per_round
        if job.settings.private and (self.over_select or self.aggregate_at < 1):
            raise SettingError(
                "a private run takes no over-select, and no aggregate-at below 1: who is in a round must not depend on "
                "who answers first: docs/privacy.md"
            )
        self.needed(cohort)
        if self.over_select and cohort == job.clients:
            raise SettingError(f"over-select has no effect: a cohort has all {cohort} clients already")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Limits":
        """Read the limits from a run config, whose keys have hyphens."""
        known = {f.name: Option(f.name.replace("_", "-"), f.type, f.default) for f in fields(cls)}
        given = {name: config[option.name] for name, option in known.items() if option.name in config}
        return cls(**{name: convert(known[name], value) for name, value in given.items()})


MakeJob = Callable[[Mapping[str, Any]], Job]
"""Builds the job from the app's run config."""


def named_job(config: Mapping[str, Any]) -> Job:
    """Build a job from the names `task` and `algorithm` and from `settings`, written `key=value; key=value`."""
    name, chosen = str(config.get("task", "")), str(config.get("algorithm", ""))
    given = parse_settings(config)
    for_run, for_task, for_algorithm = sort_settings(given, name, [chosen])
    task, built, settings = assemble(name, chosen, for_run, for_task, for_algorithm[chosen])
    return Job(name, task.network, built, settings, task.data.clients, task.data, task.data, task.options)


def own_job(
    config: Mapping[str, Any],
    model: nn.Module,
    example: Tensor | Mapping[str, Tensor],
    *,
    clients: int,
    loss: Loss = cross_entropy,
    metrics: Mapping[str, Metric | Whole] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    name: str = "own",
    **defaults: Any,
) -> Job:
    """Build a job from your own module and one example input. `test` holds the server's test examples, if it has any.

    `algorithm` and `settings` come from the run config; `defaults` are run settings that the config may override.
    """
    network, chosen = Network(model, as_inputs(example), loss, check_metrics(metrics)), str(config.get("algorithm", ""))
    for_run, _, for_algorithm = sort_settings(parse_settings(config), None, [chosen])
    _refuse_simulated(defaults)
    settings = with_noise(run_settings({**defaults, **for_run}, clients), clients)
    built = named_algorithm(chosen, network, **for_algorithm[chosen])
    check_useful(settings, built, network, clients, tested=True)
    # Only its test part is ever used.
    tested = examined(test, network) if test is not None else None
    return Job(name, network, built, settings, clients, test=tested)


def with_rounds(config: Mapping[str, Any]) -> dict[str, Any]:
    """The run config with its key `rounds`, unless that is 0, among its settings."""
    rounds = config.get("rounds", 0)
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:
        raise SettingError(f"rounds must be a whole number of at least 0, got {rounds!r}")
    settings = "; ".join(filter(None, [str(config.get("settings", "")), f"rounds={rounds}"]))
    return {**config, **({"settings": settings} if rounds else {})}


def parse_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Read `lambda0=5e-6; server_optimiser=Adam(lr=0.01, eps=1e-8)` into a dictionary."""
    pairs = [pair.strip() for pair in str(config.get("settings", "")).split(";") if pair.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise SettingError(f"settings are written key=value; key=value, got {pair!r}")
    given = {key.strip(): value.strip() for key, value in (pair.split("=", 1) for pair in pairs)}
    _refuse_simulated(given)
    return given


def _refuse_simulated(given: Mapping[str, Any]) -> None:
    """A deployment would accept these without effect."""
    for key in given:
        if key in SIMULATED:
            raise SettingError(f"{key} is a setting of the simulator; a deployment has none")
