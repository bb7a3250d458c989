"""The command line: `run`, `compare`, `sweep`, `resume`, `reproduce`, lists, and the commands of `commands.py`."""

import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedprior import commands, frontier, runs, sweeps
from fedprior.algorithms import ALGORITHMS, algorithm, algorithm_settings, entry
from fedprior.budget import read_bytes, sparsity_for
from fedprior.commands import console
from fedprior.em import Algorithm
from fedprior.errors import DivergedError, FedpriorError, SettingError
from fedprior.frontier import BASELINES, SPARSITIES, WIRES
from fedprior.progress import RunProgress
from fedprior.repeat import repeat_command
from fedprior.report import markdown_table, pareto, summary_table
from fedprior.report.figures import NoMatplotlibError, save
from fedprior.report.tensorboard import TensorBoard
from fedprior.report.write import write_report
from fedprior.reproduce import EXPERIMENTS, read_seeds, reproduce
from fedprior.settings import plain
from fedprior.simulate import Result, RunFolder, ranks
from fedprior.simulate.run import Settings
from fedprior.tasks import TASKS, Task, task_options
from fedprior.tasks import task as named_task
from fedprior.version import __version__

app = typer.Typer(
    help="Federated learning as hard EM: an algorithm is a prior over client parameters.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True)
# typer brings its own copy of click or depends on it; either way this is the base of errors in the command line.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

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
Wire = Annotated[
    str | None,
    typer.Option(
        "--wire", help="Precision of messages: float32, float16, bfloat16, int8, int4; or DOWN/UP, as int8/int4."
    ),
]
Sparsity = Annotated[
    float | None, typer.Option("--sparsity", help="FedSparse for this share of parameters gone, as 0.8; no λ0 needed.")
]
MaxParameters = Annotated[
    int | None, typer.Option("--max-parameters", help="FedSparse for a network of so many parameters at most.")
]
Budget = Annotated[
    str | None, typer.Option("--budget", help="FedSparse for so many bytes in the whole run at most, as 5GiB.")
]
Board = Annotated[Path | None, typer.Option("--tensorboard", help="Log to TensorBoard too, in this folder.")]


commands.register(app)


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options before the command."""
    if version:
        console.print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command("run")
def run_command(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`.")],
    algorithm: Annotated[
        str | None,
        typer.Option(help="See `fedprior algorithms`; fedavg if not given, and fedsparse if asked for a size."),
    ] = None,
    rounds: Rounds = None,
    seed: Seed = 0,
    clients_per_round: Cohort = None,
    sparsity: Sparsity = None,
    max_parameters: MaxParameters = None,
    budget: Budget = None,
    wire: Wire = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/TASK-ALGORITHM-SEED if not given.")] = None,
    label: Annotated[str | None, typer.Option(help="A name for this setting of the algorithm.")] = None,
    tensorboard: Board = None,
    set_: Set = [],  # noqa: B006  # typer reads the default, nobody changes it
) -> None:
    """Train one algorithm on one task."""
    size = _size(sparsity, max_parameters, budget)
    algorithm = algorithm or ("fedsparse" if size or budget else "fedavg")
    folder = out or runs.unused_folder(Path("runs") / f"{task}-{algorithm}-{seed}")
    result = _run(
        task,
        [algorithm],
        rounds,
        seed,
        clients_per_round,
        device,
        [folder],
        label,
        [*_settings(set_, data_dir, wire), *size],
        tensorboard,
        budget,
    )
    console.print(summary_table([r.summary for r in result]))
    console.print(f"{folder}", soft_wrap=True)


@app.command()
def compare(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`.")],
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas.")] = "fedavg,fedsparse",
    rounds: Rounds = None,
    seed: Seed = 0,
    clients_per_round: Cohort = None,
    sparsity: Sparsity = None,
    max_parameters: MaxParameters = None,
    budget: Budget = None,
    wire: Wire = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for the runs and the table; runs/compare-TASK if not given.")
    ] = None,
    tensorboard: Board = None,
    set_: Set = [],  # noqa: B006
) -> None:
    """Train several algorithms on one task and print one table."""
    names = _names(algorithms)
    if not names or len(set(names)) != len(names):
        raise SettingError(f"--algorithms takes different names separated by commas, got {algorithms!r}")
    folder = out or runs.unused_folder(Path("runs") / f"compare-{task}")
    _check_unused([folder])
    folders = [folder / name for name in names]
    settings = [*_settings(set_, data_dir, wire), *_size(sparsity, max_parameters, budget)]
    results = _run(task, names, rounds, seed, clients_per_round, device, folders, None, settings, tensorboard, budget)
    _conclude([r.summary for r in results], folder)


@app.command()
def sweep(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`.")],
    algorithm: Annotated[str, typer.Option(help="An algorithm's name; see `fedprior algorithms`.")] = "fedsparse",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    wire: Wire = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the runs; runs/sweep-TASK if not given.")] = None,
    set_: Annotated[
        list[str],
        typer.Option("--set", help="key=value, or key=value,value,… for one run each. Repeatable.", show_default=False),
    ] = [],  # noqa: B006  # as above
) -> None:
    """Train every combination of seeds and settings; on a GPU, those that differ in numbers only train together.

    A sweep that was stopped goes on when it is started again with the same --out.
    """
    chosen = out or runs.unused_folder(Path("runs") / f"sweep-{task}")
    given = {"device": device, "rounds": rounds, "clients_per_round": clients_per_round}
    options = {key: value for key, value in given.items() if value is not None}
    specs = sweeps.plan(task, algorithm, _numbers(seeds), _pairs(_settings(set_, data_dir, wire)), chosen, options)
    left = sweeps.unfinished(specs)
    _name_diverged(list(zip(left, sweeps.train(left, _watch), strict=True)))
    summaries = [RunFolder(spec.out).read_summary() for spec in specs if RunFolder(spec.out).summary.exists()]
    if not summaries:
        raise DivergedError("every run of the sweep diverged; lower the learning rates, and choose another --out")
    _conclude(summaries, chosen)


def _name_diverged(outcomes: list[tuple[sweeps.Spec, sweeps.Outcome]]) -> None:
    for spec, outcome in outcomes:
        if isinstance(outcome, DivergedError):
            errors.print(
                f"[bold red]{escape(spec.label)}, seed {spec.seed}:[/] {escape(str(outcome))}",
                highlight=False,
                soft_wrap=True,
            )


def _conclude(summaries: list[dict[str, Any]], folder: Path) -> None:
    """What `compare` and `sweep` end with: a table and a page of the folder's runs."""
    console.print(summary_table(summaries))
    if ranks.first():
        (folder / "table.md").write_text(markdown_table(summaries), encoding="utf-8")
        write_report([folder], folder / "report.html", repeat=repeat_command)
    for name in ("table.md", "report.html"):
        console.print(f"{folder / name}", soft_wrap=True)


def _watch(group: list[sweeps.Spec], rounds: int) -> RunProgress:
    """One bar for specs that train together."""
    label = group[0].label if len(group) == 1 else f"{group[0].algorithm} × {len(group)}"
    return RunProgress(console, label, rounds)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"--seeds takes whole numbers separated by commas, got {text!r}") from error


@app.command()
def resume(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Go on where a run was stopped."""
    folder = RunFolder(run)
    about, settings, _, _ = runs.read_config(folder)
    with RunProgress(console, about["label"], settings.rounds) as progress:
        progress.catch_up(folder.records())
        result = runs.resume(run, progress=progress)
    console.print(summary_table([result.summary]))


@app.command("reproduce")
def reproduce_command(
    experiment: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}.")],
    seeds: Annotated[str, typer.Option(help="How many, from 0; or which: 0,1,5.")] = "3",
    methods: Annotated[str | None, typer.Option(help="Labels separated by commas; all if not given.")] = None,
    rounds: Rounds = None,
    wire: Wire = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The experiment's folder; runs/reproduce-EXPERIMENT if not given.")
    ] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Train nothing; table and figures of what is there.")
    ] = False,
    set_: Set = [],  # noqa: B006
) -> None:
    """Make an experiment of the paper: runs, table beside the paper's, figures. Said again, it goes on."""
    given = {"device": device} | ({} if rounds is None else {"rounds": str(rounds)})
    given |= _pairs(_settings(set_, data_dir, wire))
    names = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    folder = out or Path("runs") / f"reproduce-{experiment}"
    reproduce(experiment, read_seeds(seeds), names, folder, given, console, table_only=table_only)


@app.command("frontier")
def frontier_command(
    task: Annotated[str, typer.Argument(help="A task's name; see `fedprior tasks`.")],
    sparsities: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(f"{s:g}" for s in SPARSITIES),
    wires: Annotated[str, typer.Option(help="Precisions as for --wire, separated by commas.")] = ",".join(WIRES),
    baselines: Annotated[str, typer.Option(help="Algorithms in full precision, or none.")] = ",".join(BASELINES),
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The folder; runs/frontier-TASK if not given.")] = None,
    set_: Set = [],  # noqa: B006
) -> None:
    """Accuracy against bytes: FedSparse for every sparsity × precision, beside others, the Pareto front marked.

    Started again with the same --out, finished runs are kept and the others go on.
    """
    folder = out or Path("runs") / f"frontier-{task}"
    given = {"device": device, "rounds": rounds, "clients_per_round": clients_per_round}
    options = {key: value for key, value in given.items() if value is not None}
    settings = _pairs(_settings(set_, data_dir))
    others = [] if baselines == "none" else _names(baselines)
    specs = frontier.plan(
        task, _decimals(sparsities), _names(wires), others, _numbers(seeds), settings, folder, options
    )
    _name_diverged(frontier.train(specs, _watch))
    if not ranks.first():
        return
    points = frontier.read(specs)
    if not points:
        raise DivergedError("every run of the frontier diverged; lower the learning rates, and choose another --out")
    title = f"{task}: accuracy against bytes, seeds {', '.join(map(str, _numbers(seeds)))}"
    console.print(pareto.terminal(title, points))
    (folder / "frontier.md").write_text(pareto.markdown(title, points), encoding="utf-8")
    paths = [folder / "frontier.md"]
    try:
        paths += save(pareto.draw(points), folder, "frontier")
    except NoMatplotlibError as error:
        console.print(f"no figure: {error}", highlight=False, markup=False, soft_wrap=True)
    for path in paths:
        console.print(f"{path}", soft_wrap=True)


@app.command()
def tasks() -> None:
    """List the tasks."""
    table = Table("task", "what", "options")
    for name, build in TASKS.items():
        options = ", ".join(f"{key}={plain(value)}" for key, value in task_options(name, {}).items())
        table.add_row(name, str(build.__doc__).strip().splitlines()[0], options)
    console.print(table)


@app.command()
def algorithms() -> None:
    """List the algorithms: prior, M-step and settings."""
    for name in ALGORITHMS:
        settings = ", ".join(f"{key}={plain(value)}" for key, value in algorithm_settings(name, {}).items())
        about = f"  prior: {entry(name).prior}  M-step: {entry(name).m_step}"
        console.print(Text.assemble((name, "bold"), about))
        console.print(Padding(settings, (0, 0, 1, 4)))


def _run(
    task: str,
    names: list[str],
    rounds: int | None,
    seed: int,
    clients_per_round: int | None,
    device: str,
    folders: list[Path],
    label: str | None,
    set_: list[str],
    tensorboard: Path | None = None,
    budget: str | None = None,
) -> list[Result]:
    """Check everything first, then train one after the other."""
    for_run, for_task, for_algorithms = runs.sort_settings(_pairs(set_), task, names)
    options = {"seed": seed, "device": device, "rounds": rounds, "clients_per_round": clients_per_round}
    given = {**{key: value for key, value in options.items() if value is not None}, **for_run}
    _check_unused(folders)
    built = named_task(task, seed=runs.run_settings(given).seed, **for_task)
    settings = runs.run_settings({**built.defaults, **given}, built)
    own = {name: {**built.algorithms.get(name, {}), **for_algorithms[name]} for name in names}
    if budget is not None:
        _stay_within(read_bytes(budget), built, own, settings)
    chosen = [algorithm(name, built.network, **own[name]) for name in names]
    results = []
    for one, folder in zip(chosen, folders, strict=True):
        board_folder = tensorboard / folder.name if tensorboard else None
        with RunProgress(console, label or one.name, settings.rounds) as progress, TensorBoard(board_folder) as board:
            progress.also = board
            results.append(runs.run(built, one, out=folder, label=label, progress=progress, **given))
    return results


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _decimals(text: str) -> list[float]:
    try:
        return [float(part) for part in _names(text)]
    except ValueError as error:
        raise SettingError(f"--sparsities takes numbers separated by commas, got {text!r}") from error


def _size(sparsity: float | None, max_parameters: int | None, budget: str | None) -> list[str]:
    """The size that was asked for, as settings; a budget becomes one when the rounds are known."""
    if sum(given is not None for given in (sparsity, max_parameters, budget)) > 1:
        raise SettingError(
            "--sparsity, --max-parameters and --budget are three ways to say one thing: give one of them"
        )
    asked = {"sparsity": sparsity, "max_parameters": max_parameters}
    return [f"{name}={value}" for name, value in asked.items() if value is not None]


def _stay_within(budget: int, task: Task, own: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Ask the algorithms that can be asked for the sparsity that a budget of bytes allows."""
    able = [name for name in own if "sparsity" in algorithm_settings(name, {})]
    if not able:
        raise SettingError(f"--budget is for FedSparse, not for {', '.join(own)}")
    for name in able:
        if own[name].get("sparsity") is not None or own[name].get("max_parameters") is not None:
            raise SettingError("a budget says what sparsity and max_parameters say: give one of them")
        build = partial(_with_sparsity, name, task, own[name])
        own[name]["sparsity"] = sparsity_for(budget, build, task.network.params(), settings, task.data.clients)
        console.print(f"{name}: {100 * own[name]['sparsity']:.1f}% sparsity for {budget:,} bytes", highlight=False)


def _with_sparsity(name: str, task: Task, own: dict[str, Any], sparsity: float) -> Algorithm:
    return algorithm(name, task.network, **{**own, "sparsity": sparsity})


def _check_unused(folders: list[Path]) -> None:
    """Before anything is computed; of several ranks only the first makes folders."""
    for folder in folders if ranks.first() else []:
        RunFolder(folder).check_unused()


def _settings(set_: list[str], data_dir: Path | None, wire: str | None = None) -> list[str]:
    """`--data-dir` is an option of a task; its full path lets a run be resumed from anywhere."""
    wired = [f"wire={wire}"] if wire else []
    return [*set_, *wired, f"data_dir={data_dir.resolve()}"] if data_dir else [*set_, *wired]


def _pairs(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise SettingError(f"--set takes key=value, got {text!r}")
    return dict(text.split("=", 1) for text in texts)


def main() -> None:
    """The entry point: errors that are the user's to mend become one line and exit code 2."""
    debug = "--debug" in sys.argv
    try:
        # `torchrun` has started several of us: the others work in silence.
        with ranks.joined():
            console.quiet = errors.quiet = not ranks.first()
            # Accepted anywhere on the line, not only before the command.
            code = app([argument for argument in sys.argv[1:] if argument != "--debug"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except (FedpriorError, UsageError, OSError) as error:
        if debug:
            traceback.print_exc()
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        errors.print(f"[bold red]error:[/] {escape(' '.join(text.split()))}", highlight=False, soft_wrap=True)
        code = 2
    if code == 130:
        errors.print(
            "stopped; `fedprior resume RUN`, or `reproduce` as before, goes on from the last checkpoint", soft_wrap=True
        )
    sys.exit(code if isinstance(code, int) else 0)
