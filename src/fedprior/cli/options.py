"""Options that several commands have, and how what is given for them is read."""

from pathlib import Path
from typing import Annotated

import typer

from fedprior.core.errors import SettingError

Set = Annotated[
    list[str],
    typer.Option("--set", help="A setting of the run, task or algorithm: key=value. Repeatable.", show_default=False),
]
Rounds = Annotated[int | None, typer.Option(help="Rounds to train; the task's default if not given.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Cohort = Annotated[int | None, typer.Option("--clients-per-round", help="Clients in a round.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="A folder with the data sets as the Hugging Face Hub lays them out.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Precision = Annotated[
    str | None,
    typer.Option(
        "--wire", help="Precision of messages: float32, float16, bfloat16, int8, int4; or DOWN/UP, as int8/int4."
    ),
]
Sparsity = Annotated[
    float | None, typer.Option("--sparsity", help="A network with this share of parameters gone: 0.8; for fednarrow.")
]
MaxParameters = Annotated[
    int | None, typer.Option("--max-parameters", help="A network of so many parameters at most; for fednarrow.")
]
Budget = Annotated[
    str | None, typer.Option("--budget", help="So many bytes in the whole run at most, as 5GiB; for fednarrow.")
]
Board = Annotated[Path | None, typer.Option("--tensorboard", help="Log to TensorBoard too, in this folder.")]


def names_in(text: str) -> list[str]:
    """Separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def seeds_in(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--seeds takes whole numbers separated by commas, got {text!r}") from error


def sparsities_in(text: str) -> list[float]:
    """Numbers, separated by commas."""
    try:
        return [float(part) for part in names_in(text)]
    except ValueError as error:
        raise SettingError(f"--sparsities takes numbers separated by commas, got {text!r}") from error


def pairs(texts: list[str]) -> dict[str, str]:
    """From `key=value`; said twice with two values, one of them is not meant."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"--set takes key=value, got {text!r}")
        if found.setdefault(key, value) != value:
            raise SettingError(f"--set {key}=… is given twice, as {found[key]} and as {value}: give one of them")
    return found


def all_settings(set_: list[str], data_dir: Path | None, wire: str | None = None) -> list[str]:
    """`--data-dir` is an option of a task; its full path lets a run be resumed from anywhere."""
    wired = [f"wire={wire}"] if wire else []
    return [*set_, *wired, f"data_dir={data_dir.resolve()}"] if data_dir else [*set_, *wired]


def asked_size(sparsity: float | None, max_parameters: int | None, budget: str | None) -> list[str]:
    """The size that was asked for, as settings; a budget becomes one when the rounds are known."""
    if sum(given is not None for given in (sparsity, max_parameters, budget)) > 1:
        raise SettingError(
            "--sparsity, --max-parameters and --budget are three ways to say one thing: give one of them"
        )
    asked = {"sparsity": sparsity, "max_parameters": max_parameters}
    return [f"{name}={value}" for name, value in asked.items() if value is not None]
