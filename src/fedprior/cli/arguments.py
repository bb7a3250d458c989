"""Options that several commands share, and how to read their values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from fedprior.core.errors import SettingError

Set = Annotated[
    list[str],
    typer.Option("--set", help="A setting of the run, task or algorithm: key=value. Repeatable.", show_default=False),
]
Rounds = Annotated[int | None, typer.Option(help="Rounds to train; the task's default if not given.")]
Seed = Annotated[int, typer.Option(help="The seed of everything random.")]
Cohort = Annotated[int | None, typer.Option("--clients-per-round", help="Clients in a round.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="A folder with the data sets in the Hugging Face Hub's layout.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Precision = Annotated[
    str | None,
    typer.Option(
        "--wire", help="Precision of messages: float32, float16, bfloat16, int8, int4; or DOWN/UP, such as int8/int4."
    ),
]
Sparsity = Annotated[
    float | None,
    typer.Option("--sparsity", help="Remove this share of parameters, such as 0.8; for fedsparse-sized, fednarrow."),
]
MaxParameters = Annotated[
    int | None, typer.Option("--max-parameters", help="The most parameters of the network; for the same.")
]
Private = Annotated[
    float | None,
    typer.Option(
        "--private", metavar="EPSILON", help="Differential privacy of every client with this budget ε; see clip, delta."
    ),
]
Budget = Annotated[
    str | None, typer.Option("--budget", help="The most bytes for the whole run, such as 5GiB; for the same.")
]
Board = Annotated[Path | None, typer.Option("--tensorboard", help="Also log to TensorBoard, in this folder.")]


def names_in(text: str) -> list[str]:
    """Read names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def seeds_in(text: str) -> list[int]:
    """Read whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--seeds takes whole numbers separated by commas, got {text!r}") from error


def numbers_in(text: str, option: str) -> list[float]:
    """Read numbers separated by commas."""
    try:
        return [float(part) for part in names_in(text)]
    except ValueError as error:
        raise SettingError(f"{option} takes numbers separated by commas, got {text!r}") from error


def pairs(texts: list[str]) -> dict[str, str]:
    """Read `key=value`; refuse a key with two different values."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"--set takes key=value, got {text!r}")
        if found.setdefault(key, value) != value:
            raise SettingError(f"--set {key}=… is given twice, as {found[key]} and as {value}: use only one")
    return found


def all_settings(set_: list[str], data_dir: Path | None, wire: str | None = None) -> list[str]:
    """Add `--data-dir`, an option of the task, as a full path, so that a run can be resumed from anywhere."""
    wired = [f"wire={wire}"] if wire else []
    return [*set_, *wired, f"data_dir={data_dir.resolve()}"] if data_dir else [*set_, *wired]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options that `run` and `compare` share."""

    rounds: Rounds = None
    seed: Seed = 0
    clients_per_round: Cohort = None
    sparsity: Sparsity = None
    max_parameters: MaxParameters = None
    budget: Budget = None
    wire: Precision = None
    private: Private = None
    device: Device = "auto"
    data_dir: DataDir = None
    tensorboard: Board = None
    set_: Set = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(given(sparsity=self.sparsity, max_parameters=self.max_parameters, budget=self.budget)) > 1:
            raise SettingError("--sparsity, --max-parameters and --budget set the same thing: use only one")

    @property
    def size(self) -> dict[str, Any]:
        """The requested size as a setting; a budget becomes one once the rounds are known."""
        return given(sparsity=self.sparsity, max_parameters=self.max_parameters)

    @property
    def sized(self) -> bool:
        """Whether a size is requested."""
        return bool(self.size) or self.budget is not None

    @property
    def settings(self) -> dict[str, str]:
        """The settings of task and algorithm, and of the run as far as they are given by `--set`."""
        size = [f"{name}={value}" for name, value in self.size.items()]
        private = [] if self.private is None else [f"epsilon={self.private:g}"]
        return pairs([*all_settings(self.set_, self.data_dir, self.wire), *private, *size])

    @property
    def run(self) -> dict[str, Any]:
        """The settings of the run that have an option."""
        return given(seed=self.seed, device=self.device, rounds=self.rounds, clients_per_round=self.clients_per_round)
