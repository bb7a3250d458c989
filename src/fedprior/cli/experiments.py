"""The commands that turn many runs into one result: `reproduce` and `frontier`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedprior.cli.arguments import (
    Cohort,
    DataDir,
    Device,
    Precision,
    Rounds,
    Set,
    all_settings,
    given,
    names_in,
    numbers_in,
    pairs,
    seeds_in,
)
from fedprior.cli.terminal import bar, console, name_diverged, stoppable
from fedprior.core.errors import DivergedError, RunError

if TYPE_CHECKING:
    from fedprior.report.records import Run

EXPERIMENTS = "cifar10, cifar100, femnist, scaffold, mnist-mini"
METHODS = "fedavg,feddrop,fedl1,narrow,narrow+dropout,learned,learned+dropout,topk,fedpm"
SPARSITIES = "0.5,0.8,0.9,0.95"
SHARES = "0.01,0.1"
WIRES = "float32,int8/int4,int4"
DROPOUT = "linear_rate=0.5"


def reproduce_command(
    experiment: Annotated[str, typer.Argument(help=f"{EXPERIMENTS}.")],
    seeds: Annotated[str, typer.Option(help="How many seeds, starting at 0; or a list: 0,1,5.")] = "3",
    methods: Annotated[str | None, typer.Option(help="Labels separated by commas; all if not given.")] = None,
    rounds: Rounds = None,
    wire: Precision = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The experiment's folder; runs/reproduce-EXPERIMENT if not given.")
    ] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Train nothing; make the table and figures of existing runs.")
    ] = False,
    set_: Set = [],  # noqa: B006  # typer reads the default, and nothing changes it
) -> None:
    """Reproduce an experiment of the paper: runs, a table next to the paper's, figures. Run it again to continue."""
    from fedprior_experiments.reproduce import read_seeds, reproduce

    chosen = {"device": device} | ({} if rounds is None else {"rounds": str(rounds)})
    chosen |= pairs(all_settings(set_, data_dir, wire))
    names = None if methods is None else names_in(methods)
    folder = out or Path("runs") / f"reproduce-{experiment}"
    with stoppable(folder, "reproduce"):
        reproduce(experiment, read_seeds(seeds), names, folder, chosen, console, table_only=table_only)


def frontier_command(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`.")],
    methods: Annotated[str, typer.Option(help=f"Of {METHODS}.")] = METHODS,
    sparsities: Annotated[str, typer.Option(help="Of the methods with a size, separated by commas.")] = SPARSITIES,
    shares: Annotated[str, typer.Option(help="Of the entries that Top-K sends, separated by commas.")] = SHARES,
    wires: Annotated[str, typer.Option(help="Precisions as for --wire, separated by commas, for all methods.")] = WIRES,
    dropout: Annotated[str, typer.Option(help="The rates of the methods with dropout.")] = DROPOUT,
    seeds: Annotated[str, typer.Option(help="Seeds separated by commas.")] = "0",
    small: Annotated[
        bool, typer.Option("--small", help="A front for trying: one sparsity, share and wire, 8 rounds.")
    ] = False,
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    beside: Annotated[Path | None, typer.Option(help="A folder of finished runs of the task to show as well.")] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Train nothing; make the table and figure of the folder's runs.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; runs/frontier-TASK if not given.")] = None,
    set_: Set = [],  # noqa: B006  # typer reads the default, and nothing changes it
) -> None:
    """Plot accuracy against bytes: every method with every precision of the wire, and the Pareto front.

    If the paper has the same experiment, its points are drawn too. Run it again with the same --out to continue:
    finished runs are kept.
    """
    from fedprior.engines import ranks
    from fedprior.runs import sweeps
    from fedprior_experiments import frontier

    folder = out or Path("runs") / f"frontier-{task}"
    if small:
        sparsities, shares, wires, rounds = "0.8", "0.05", "int4", rounds or 8
    options = given(device=device, rounds=rounds, clients_per_round=clients_per_round)
    settings = pairs(all_settings(set_, data_dir))
    grid = frontier.Grid(
        names_in(methods),
        numbers_in(sparsities, "--sparsities"),
        numbers_in(shares, "--shares"),
        names_in(wires),
        seeds_in(seeds),
        pairs(names_in(dropout)),
    )
    specs = frontier.plan(task, grid, settings, folder, options)
    others = frontier.beside(beside, task) if beside else []
    if table_only:
        found = frontier.kept(specs, frontier.beside(folder, task), others)
        if not found:
            raise RunError(f"{folder} holds no finished run of {task}")
        if ranks.first():
            _show_front(found, folder, task)
        return
    with stoppable(folder, "frontier"):
        name_diverged(sweeps.train_missing(specs, bar))
    if ranks.first():
        found = frontier.read(specs, others)
        if not found:
            raise DivergedError("every run of the frontier diverged; lower the learning rates, choose another --out")
        _show_front(found, folder, task)


def _show_front(found: "list[Run]", folder: Path, task: str) -> None:
    """Print and write the table and the figure of a front."""
    from fedprior.core.files import write_atomically
    from fedprior.report import pareto
    from fedprior.report.figures import NoMatplotlibError, save
    from fedprior.report.records import group_runs
    from fedprior_experiments import frontier

    found, notes = frontier.comparable(found)
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    points = pareto.points_of(group_runs(found))
    title = f"{task}: accuracy against bytes, seeds {', '.join(map(str, sorted({run.seed for run in found})))}"
    table = pareto.table_of_points(title, points)
    console.print(table.terminal(box=None, title_style="bold"))
    write_atomically(folder / "frontier.md", table.markdown())
    paths = [folder / "frontier.md"]
    try:
        paths += save(pareto.draw(points, frontier.published(found[0])), folder, "frontier")
    except NoMatplotlibError as error:
        console.print(f"no figure: {error}", highlight=False, markup=False, soft_wrap=True)
    for path in paths:
        console.print(f"{path}", soft_wrap=True)


COMMANDS = (reproduce_command, frontier_command)
