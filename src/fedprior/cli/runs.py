"""The commands that train: `run`, `compare`, `sweep`, `resume`; and `rollback`, before one that trains again."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedprior.cli.arguments import (
    Asked,
    Cohort,
    DataDir,
    Device,
    Precision,
    Rounds,
    all_settings,
    given,
    names_in,
    pairs,
    seeds_in,
)
from fedprior.cli.terminal import bar, conclude, console, name_diverged, name_left_out, stoppable
from fedprior.core.errors import DivergedError, SettingError

if TYPE_CHECKING:
    from fedprior.em import Algorithm
    from fedprior.runs.asked import Parts
    from fedprior.runs.drive import Result


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Asked` in place of its last parameter: typer reads a command's signature."""

    @wraps(command)
    def called(**options: Any) -> None:
        command(asked=Asked(**{one.name: options.pop(one.name) for one in fields(Asked)}), **options)

    *own, _ = inspect.signature(command).parameters.values()
    shared = list(inspect.signature(Asked).parameters.values())
    # Neither a parameter nor a field may have a list as its default, but typer wants one.
    shared = [one.replace(default=[]) if one.name == "set_" else one for one in shared]
    called.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return called


@with_shared_options
def run_command(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`; or FILE.py:FUNCTION.")],
    algorithm: Annotated[
        str | None,
        typer.Option(help="See `fedprior algorithms`; by default fedavg, or fednarrow if a size is given."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/TASK-ALGORITHM-SEED if not given.")] = None,
    label: Annotated[str | None, typer.Option(help="A name for this setting of the algorithm.")] = None,
    *,
    asked: Asked,
) -> None:
    """Train one algorithm on one task."""
    from fedprior.report import summary_table
    from fedprior.runs import start

    if algorithm is None and asked.sized:
        _say_narrow()
    (algorithm,) = _of_a_size([algorithm or ("fednarrow" if asked.sized else "fedavg")], asked)
    folder = out or start.unused_folder(Path("runs") / f"{_short(task)}-{algorithm}-{asked.seed}")
    results = _run(task, [algorithm], asked, [folder], label)
    console.print(summary_table([r.summary for r in results]))
    name_left_out(results)
    console.print(f"{folder}", soft_wrap=True)


@with_shared_options
def compare_command(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`; or FILE.py:FUNCTION.")],
    algorithms: Annotated[
        str | None,
        typer.Option(help="Names separated by commas; by default fedavg,fedsparse or, with a size, fedavg,fednarrow."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the runs and the table; runs/compare-TASK if not given.")
    ] = None,
    *,
    asked: Asked,
) -> None:
    """Train several algorithms on one task and print one table."""
    from fedprior.runs import start

    if algorithms is None and asked.sized:
        _say_narrow()
    algorithms = algorithms if algorithms is not None else f"fedavg,{'fednarrow' if asked.sized else 'fedsparse'}"
    names = _of_a_size(names_in(algorithms), asked)
    if not names or len(set(names)) != len(names):
        raise SettingError(f"--algorithms takes different names separated by commas, got {algorithms!r}")
    folder = out or start.unused_folder(Path("runs") / f"compare-{_short(task)}")
    _check_unused([folder])
    results = _run(task, names, asked, [folder / name for name in names])
    conclude([r.summary for r in results], folder)
    name_left_out(results)


def sweep_command(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`; or FILE.py:FUNCTION.")],
    algorithm: Annotated[str, typer.Option(help="An algorithm's name; see `fedprior algorithms`.")] = "fedsparse",
    seeds: Annotated[str, typer.Option(help="Seeds separated by commas.")] = "0,1,2",
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    wire: Precision = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the runs; runs/sweep-TASK if not given.")] = None,
    set_: Annotated[
        list[str],
        typer.Option("--set", help="key=value, or key=value,value,… for one run each. Repeatable.", show_default=False),
    ] = [],  # noqa: B006  # as above
) -> None:
    """Train every combination of seeds and settings. On a GPU, runs that differ only in numbers train together.

    To continue a sweep that was stopped, run it again with the same --out.
    """
    from fedprior.runs import start, sweeps
    from fedprior.runs.folder import RunFolder

    chosen = out or start.unused_folder(Path("runs") / f"sweep-{_short(task)}")
    options = given(device=device, rounds=rounds, clients_per_round=clients_per_round)
    specs = sweeps.plan(task, algorithm, seeds_in(seeds), pairs(all_settings(set_, data_dir, wire)), chosen, options)
    with stoppable(chosen, "sweep"):
        name_diverged(sweeps.train_missing(specs, bar))
    summaries = [RunFolder(spec.out).read_summary() for spec in specs if RunFolder(spec.out).summary.exists()]
    if not summaries:
        raise DivergedError("every run of the sweep diverged; lower the learning rates, and choose another --out")
    conclude(summaries, chosen)


def resume_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    rounds: Annotated[int | None, typer.Option(help="The total number of rounds to reach.")] = None,
) -> None:
    """Continue a run that was stopped, or extend it with more rounds."""
    from fedprior.report import summary_table
    from fedprior.report.progress import RunProgress
    from fedprior.runs import start
    from fedprior.runs.folder import RunFolder

    folder = RunFolder(run)
    about, settings, _, _ = start.read_config(folder)
    with stoppable(run), RunProgress(console, about["label"], rounds or settings.rounds) as progress:
        progress.catch_up(folder.records())
        result = start.resume(run, rounds=rounds, progress=progress)
    console.print(summary_table([result.summary]))
    name_left_out([result])


def rollback_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    to: Annotated[int, typer.Option(help="A round whose checkpoint is kept, under checkpoints.")],
) -> None:
    """Put a run back to an earlier round; what came after it is removed."""
    from fedprior.runs.folder import RunFolder
    from fedprior.runs.kept import rollback

    rollback(run, to)
    console.print(f"{run} is back at round {to}; go on with {RunFolder(run).again}", soft_wrap=True)


def _run(task: str, names: list[str], asked: Asked, folders: list[Path], label: str | None = None) -> "list[Result]":
    """Check everything first, then train one after another."""
    from fedprior.report.progress import RunProgress
    from fedprior.report.tensorboard import TensorBoard
    from fedprior.runs import start
    from fedprior.runs.asked import assemble, sort_settings

    for_run, for_task, own = sort_settings(asked.settings, task, names)
    run = {**asked.run, **for_run}
    _check_unused(folders)
    first = assemble(task, names[0], run, for_task, own[names[0]])
    if asked.budget is not None:
        _stay_within(asked.budget, first, own)
    chosen = [assemble(first.task, name, run, algorithm_settings=own[name]).algorithm for name in names]
    settings, results = first.settings, []
    for one, folder in zip(chosen, folders, strict=True):
        board_folder = asked.tensorboard / folder.name if asked.tensorboard else None
        bars = RunProgress(console, label or one.name, settings.rounds)
        with stoppable(folder), bars as progress, TensorBoard(board_folder) as board:
            progress.also = board
            progress.opening = f"{one.name}: {one.steps}, batches of {settings.batch_size}"
            results.append(start.run(first.task, one, out=folder, label=label, progress=progress, **run))
    return results


def _stay_within(budget: str, parts: "Parts", own: dict[str, dict[str, Any]]) -> None:
    """Give algorithms that support it the sparsity that a budget of bytes allows."""
    from fedprior.catalogue.algorithms import check_sized, sized
    from fedprior.runs.asked import assemble
    from fedprior.runs.budget import read_bytes, sparsity_for

    task, most = parts.task, read_bytes(budget)
    able = [name for name in own if sized(name)]
    if not able:
        for name in own:
            check_sized(name)
        raise SettingError(f"--budget is for fednarrow and fedsparse-sized, not for {', '.join(own)}")
    for name in able:
        if own[name].get("sparsity") is not None or own[name].get("max_parameters") is not None:
            raise SettingError("a budget sets the same thing as sparsity and max_parameters: use only one")

        def build(sparsity: float, name: str = name) -> "Algorithm":
            return assemble(task, name, vars(parts.settings), None, {**own[name], "sparsity": sparsity}).algorithm

        own[name]["sparsity"] = sparsity_for(most, build, task.network, parts.settings, task.data.clients)
        console.print(f"{name}: {100 * own[name]['sparsity']:.1f}% sparsity for {most:,} bytes", highlight=False)


def _say_narrow() -> None:
    """Tell a user who named no algorithm which one a size implies."""
    console.print(
        "asked for a size: fednarrow, a network narrowed before training (fedsparse-sized learns what to keep)"
    )


def _of_a_size(names: list[str], asked: Asked) -> list[str]:
    """The algorithms that were asked for: with a size, FedSparse is the one that learns which gates fit it."""
    if (not asked.sized and not {"sparsity", "max_parameters"} & asked.settings.keys()) or "fedsparse" not in names:
        return names
    console.print("asked for a size: fedsparse is fedsparse-sized, whose clients vote on what fits (not λ₀)")
    return ["fedsparse-sized" if name == "fedsparse" else name for name in names]


def _short(task: str) -> str:
    from fedprior.catalogue.tasks import short

    return short(task)


def _check_unused(folders: list[Path]) -> None:
    """Check before anything is computed; with several ranks, only the first creates folders."""
    from fedprior.engines import ranks
    from fedprior.runs.folder import RunFolder

    for folder in folders if ranks.first() else []:
        RunFolder(folder).check_unused()


COMMANDS = (run_command, compare_command, sweep_command, resume_command, rollback_command)
